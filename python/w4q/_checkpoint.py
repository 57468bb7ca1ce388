"""Packed checkpoints, opened for reading."""

from __future__ import annotations

import os

from . import _w4q


#: What tensors of packed linears are called: docs/checkpoint.md.
plane_names = r"\.(\d+\.(codes|scales|codebook|zeros|group_index|nested_\w+|input_scales|tensor_scale)|input_scale)$"


class Array:
    """A dense array on the CPU that others take by DLPack without a copy: numpy.from_dlpack(a), torch.from_dlpack(a).
    NumPy has no bfloat16."""

    def __init__(self, values: _w4q.Array):
        self._values = values
        self.shape = values.shape
        self.dtype = values.dtype
        self.nbytes = values.nbytes

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy:
            raise BufferError("w4q.Array hands its memory on: copy=True is for the one who takes it")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("w4q.Array stands on the CPU")
        capsule = self._values._dlpack()
        return capsule.__dlpack__() if hasattr(capsule, "__dlpack__") else capsule

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()

    def numpy(self):
        import numpy

        return numpy.from_dlpack(self)

    def torch(self):
        import torch

        return torch.from_dlpack(self)

    def __repr__(self) -> str:
        return f"w4q.Array({self.dtype} {list(self.shape)})"


class Checkpoint:
    """A folder with a quantized model, w4q's or another program's that w4q reads. Made by w4q.open()."""

    def __init__(self, path: str | os.PathLike, residual: bool = True):
        self._checkpoint = _w4q.Checkpoint(os.fspath(path), residual)
        self.path = os.fspath(path)

    @property
    def names(self) -> list[str]:
        """Module paths of the packed linears."""
        return self._checkpoint.names

    def linear(self, name: str) -> _w4q.PackedLinear:
        """A packed linear: out_features, in_features, schemes and layouts (one for each pass), nbytes."""
        return self._checkpoint.linear(name)

    def schemes(self, name: str) -> list[str]:
        """The scheme of each pass: ["kbit3-b32-e4m4"]."""
        return self.linear(name).schemes

    def decode(self, name: str, dtype: str = "float32") -> Array:
        """The weight [out_features, in_features] that a packed linear computes with, input scale and rotations undone;
        float32 exactly, float16 and bfloat16 rounded once."""
        return Array(self.linear(name).decode(dtype))

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors in the files, planes among them."""
        return self._checkpoint.tensors

    def tensor(self, name: str) -> Array:
        """A tensor as it is stored."""
        return Array(self._checkpoint.tensor(name))

    def __repr__(self) -> str:
        return f"w4q.Checkpoint({self.path!r}, {len(self.names)} packed linears)"


def open(path: str | os.PathLike, *, residual: bool = True) -> Checkpoint:
    """Opens a folder: its config and the headers of its files; weights are read when they are asked for.
    residual=False leaves further passes out."""
    return Checkpoint(path, residual)
