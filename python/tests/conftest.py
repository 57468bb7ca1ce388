"""Checkpoints of the bundled model, made once."""

from __future__ import annotations

import pathlib

import pytest
import w4q

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "testdata" / "w4q-llama-tiny"

#: Options of w4q.quantize: one of every family of schemes, packed head and embeddings, several passes.
VARIANTS = {
    "kbit3": {"k": 3},
    "kbit4": {"k": 4},
    "int4": {"scheme": "int4-g128-f16"},
    "int4-asym": {"scheme": "int4-g64-f16-asym"},
    "rotated4": {"scheme": "rotated4-d128"},
    "residual": {"scheme": "rotated4-d128+rotated2-d128"},
    "trellis3": {"scheme": "trellis3"},
    "exl3": {"scheme": "exl3-4"},
    "tables": {"k": 4, "embedding_scheme": "int8-row-f16"},
    "head": {"k": 4, "lm_head": True},
}


@pytest.fixture(scope="session")
def model() -> pathlib.Path:
    return MODEL


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    """The folder of a variant, in an optional layout for a GPU."""
    folders: dict[tuple[str, str | None], pathlib.Path] = {}

    def made(variant: str, target: str | None = None) -> pathlib.Path:
        key = (variant, target)
        if key not in folders:
            folder = tmp_path_factory.mktemp(variant) / "out"
            if target is None:
                w4q.quantize(MODEL, folder, device="cpu", **VARIANTS[variant])
            else:
                w4q.repack(made(variant), folder, target=target, device="cpu")
            folders[key] = folder
        return folders[key]

    return made
