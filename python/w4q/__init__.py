"""w4q: quantize → repack → verify LLM checkpoints, and run them in torch and transformers (docs/python.md).

    import w4q
    w4q.quantize("MODEL", "OUT", k=3)
    w4q.verify("OUT", base="MODEL")["passed"]
    w4q.open("OUT").decode("model.layers.0.mlp.up_proj").numpy()

    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained("OUT", device_map="cuda")
"""

from __future__ import annotations

import os as _os

# Threads that spin while they wait starve others on a busy machine; OpenMP's library reads this once, when it is loaded.
_given = _os.environ.get("GOMP_SPINCOUNT") or _os.environ.get("OMP_WAIT_POLICY")
if not _given:
    _os.environ["GOMP_SPINCOUNT"] = "1000"
from . import _w4q  # noqa: E402

if not _given:
    del _os.environ["GOMP_SPINCOUNT"]

from . import _registration  # noqa: E402
from ._checkpoint import Array, Checkpoint, open  # noqa: E402
from ._commands import calibrate, command, compare, inspect, quantize, repack, verify  # noqa: E402
from ._error import Error  # noqa: E402

__version__ = _w4q.version
has_cuda = _w4q.has_cuda
__all__ = ["Array", "Checkpoint", "Error", "Linear", "calibrate", "command", "compare", "has_cuda", "inspect", "open",
           "quantize", "repack", "verify"]

_registration.install()


def __getattr__(name: str):
    if name == "Linear":  # torch is imported where it is asked for
        from .linear import Linear

        return Linear
    raise AttributeError(f"module 'w4q' has no attribute {name!r}")
