"""The commands of the program as functions."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable

from . import _w4q
from ._error import Error

Progress = Callable[[str, int, int, str], None]

_turn = threading.RLock()  # one command at a time in a process


def _words(name: str, value) -> list[str]:
    """An option as the command line has it: k=3 is --k=3, lm_head=True --lm-head, keep=[a, b] --keep=a --keep=b."""
    option = "--" + name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, (str, bytes, os.PathLike)):
        return [f"{option}={os.fsdecode(value)}"]
    if isinstance(value, Iterable):
        return [word for item in value for word in _words(name, item)]
    return [f"{option}={value!r}"]


def _argument(path) -> str:
    word = os.fsdecode(path)
    return "./" + word if word.startswith("-") else word


def _show(label: str, done: int, total: int, unit: str) -> None:
    """progress=True: a line on stderr that moves."""
    end = "\n" if done >= total else ""
    print(f"\r\033[K{label} {100 * done // total} %, {done} of {total} {unit}", end=end, file=sys.stderr, flush=True)


def command(name: str, *arguments, progress: Progress | bool | None = None, check: bool = True, **options) -> dict | None:
    """Runs `w4q NAME ARGUMENTS --OPTIONS` in this process, and returns the report that --json prints.

    Options are those of the command line with underscores: lm_head=True, target_bpw=3.5, keep=["*.down_proj"]. None and
    False leave one out. `progress` is called with a label, what is done, the total, and their unit, in the thread of the
    caller; True shows it on stderr. The interpreter's lock is free meanwhile; Ctrl-C stops the command, which leaves
    nothing half-written behind. One command runs at a time.

    Raises w4q.Error; also, unless check=False, where checks of verify or compare did not hold: Error.report has them.
    """
    words = [name, *(word for option, value in options.items() for word in _words(option, value)), "--quiet"]
    words += [_argument(argument) for argument in arguments]
    listener = (_show if progress is True else progress) or None
    with _turn:
        outcome = _w4q.run_command(words, listener)
    report = json.loads(outcome.report) if outcome.report else None
    if check and outcome.exit_status != 0:
        error = Error("verification_failed", outcome.exit_status, f"w4q {name}: checks did not hold", _failed(report))
        error.report = report
        raise error
    return report


def _failed(report: dict | None) -> str:
    """A line for every check that failed."""
    checks = (report or {}).get("checks", [])
    return "\n".join(f"{row.get('name')}: {row.get('detail', '')}" for row in checks if row.get("passed") is False)


def quantize(model, output=None, *, progress: Progress | bool | None = None, **options) -> dict:
    """Quantizes the 16-bit checkpoint `model` into the folder `output`: quantize("MODEL", "OUT", k=3),
    quantize("MODEL", "OUT", quality="good", calib="text.txt", target_bpw=3.5). Options as of `w4q quantize --help-all`."""
    return command("quantize", model, output=output, progress=progress, **options)


def calibrate(model, output=None, *, progress: Progress | bool | None = None, **options) -> dict:
    """Statistics of activations, for quantize(…, stats=FILE): calibrate("MODEL", "stats.safetensors", text="text.txt")."""
    return command("calibrate", model, output=output, progress=progress, **options)


def repack(input, output=None, *, progress: Progress | bool | None = None, **options) -> dict:
    """Another layout or another program's checkpoint: repack("OUT", "OUT2", target="sm89"), repack("AWQ", "OUT",
    to="gptq-v2"). Options as of `w4q repack --help-all`."""
    return command("repack", input, output=output, progress=progress, **options)


def verify(model, *, base=None, check: bool = True, progress: Progress | bool | None = None, **options) -> dict:
    """Proves that a checkpoint is sound and says how far it is from its base: verify("OUT", base="MODEL",
    ppl="text.txt", max_kl=0.08). Raises w4q.Error, whose `report` has everything, where a check did not hold;
    check=False returns the report all the same. Options as of `w4q verify --help-all`."""
    return command("verify", model, base=base, check=check, progress=progress, **options)


def compare(a, b, *, base=None, check: bool = True, progress: Progress | bool | None = None, **options) -> dict:
    """Two versions of a model side by side: compare("A", "B", base="MODEL", ids="eval.u16")."""
    return command("compare", a, b, base=base, check=check, progress=progress, **options)


def inspect(path, **options) -> dict:
    """What a checkpoint holds: inspect("OUT"), inspect("OUT", tensor="model.layers.0.mlp.up_proj")."""
    return command("inspect", path, **options)
