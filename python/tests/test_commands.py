"""Commands as functions: the reports of the command line, its errors, progress and interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import w4q


def test_reports_are_those_of_the_command_line(model, tmp_path):
    report = w4q.quantize(model, tmp_path / "out", k=3, keep=["*.down_proj", "*.o_proj"], device="cpu")
    assert report["schema"] == "quantize"
    packed = w4q.open(tmp_path / "out").names
    assert packed and not [name for name in packed if name.endswith(("down_proj", "o_proj"))]
    program = os.environ.get("W4Q")
    if program:
        told = subprocess.run([program, "inspect", tmp_path / "out", "--json"], capture_output=True, check=True)
        assert json.loads(told.stdout) == w4q.inspect(tmp_path / "out")


def test_flags_numbers_and_dry_runs(model, tmp_path):
    plan = w4q.quantize(model, k=4, lm_head=True, dry_run=True, device="cpu")
    assert plan["schema"] == "plan" and not list(tmp_path.iterdir())


def test_an_error_has_its_parts(tmp_path):
    with pytest.raises(w4q.Error) as raised:
        w4q.quantize(tmp_path / "nothing", tmp_path / "out")
    error = raised.value
    assert error.code == "bad_file" and error.exit_status == 3
    assert error.place.endswith("nothing") and error.summary in str(error)
    assert not (tmp_path / "out").exists()


def test_unknown_options_are_named(model, tmp_path):
    with pytest.raises(w4q.Error, match="--no-such-option") as raised:
        w4q.quantize(model, tmp_path / "out", no_such_option=1)
    assert raised.value.code == "bad_argument" and raised.value.remedy == "w4q quantize --help"


def test_checks_that_fail_raise_with_the_report(make, model):
    folder = make("kbit3")
    assert w4q.verify(folder, base=model)["passed"]
    wanted = {"base": model, "ids": model / "own" / "selfgen.ids.u16", "windows": 2, "ctx": 64, "device": "cpu", "max_kl": 1e-6}
    with pytest.raises(w4q.Error) as raised:
        w4q.verify(folder, **wanted)
    assert raised.value.code == "verification_failed" and raised.value.exit_status == 1
    assert raised.value.report["passed"] is False and raised.value.details
    assert w4q.verify(folder, check=False, **wanted)["passed"] is False


def test_a_report_after_an_error_and_after_a_replaced_input(make, model, tmp_path):
    """One process does many works: what went wrong before, or was replaced since, is no matter of the next one."""
    with pytest.raises(w4q.Error):
        w4q.verify(tmp_path / "nothing")
    opened = w4q.quantize(model, tmp_path / "out", k=2, device="cpu") and w4q.open(tmp_path / "out")
    before = opened.decode(opened.names[0]).numpy().copy()
    w4q.quantize(model, tmp_path / "out", k=5, overwrite=True, device="cpu")
    assert w4q.verify(tmp_path / "out", base=model)["passed"]
    assert (opened.decode(opened.names[0]).numpy() == before).all()


def test_progress_reaches_the_end_in_the_callers_thread(model, tmp_path):
    seen = []
    w4q.quantize(model, tmp_path / "out", k=3, device="cpu",
                 progress=lambda label, done, total, unit: seen.append((label, done, total, unit, threading.get_ident())))
    assert seen and {row[4] for row in seen} == {threading.get_ident()}
    assert any(done == total for _, done, total, _, _ in seen)
    assert all(0 <= done <= total and label and unit for label, done, total, unit, _ in seen)


def test_an_exception_of_the_callback_stops_the_work(model, tmp_path):
    class Enough(Exception):
        pass

    def stop(*_):
        raise Enough

    with pytest.raises(Enough):
        w4q.verify(model, ids=model / "own" / "selfgen.ids.u16", device="cpu", progress=stop)
    assert w4q.inspect(model)["schema"] == "inspect"


def test_a_command_within_a_command_is_refused(model, tmp_path):
    errors = []

    def again(*_):
        try:
            w4q.inspect(model)
        except w4q.Error as error:
            errors.append(error.code)

    w4q.quantize(model, tmp_path / "out", k=3, device="cpu", progress=again)
    assert errors and set(errors) == {"bad_argument"}


def test_other_threads_run_meanwhile(model):
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.01)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    w4q.verify(model, ids=model / "own" / "selfgen.ids.u16", device="cpu", ctx=256)
    elapsed = time.monotonic() - begin
    done.set()
    thread.join()
    # A thread that had to wait for the command would tick once or twice.
    assert ticks > elapsed / 0.01 / 10


def test_ctrl_c_stops_cleanly(model, tmp_path):
    script = (
        "import os, signal, w4q\n"
        "def stop(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n"
        f"  w4q.quantize({str(model)!r}, {str(tmp_path / 'out')!r}, scheme='trellis4', device='cpu', threads=1, progress=stop)\n"
        "except KeyboardInterrupt:\n"
        "  print('interrupted'); raise\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "interrupted\n" and run.returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []
