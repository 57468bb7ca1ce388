"""w4q.Linear: a packed linear layer as a torch module."""

from __future__ import annotations

import itertools
import threading
import weakref

import torch

from . import _w4q
from ._checkpoint import Array, Checkpoint

has_cuda: bool = _w4q.has_cuda


class PackedWeight:
    """A packed weight as the operation w4q::linear finds it: by a number, since operations take tensors and numbers."""

    _numbers = itertools.count(1)
    _known: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()

    def __init__(self, packed: _w4q.PackedLinear):
        self.packed = packed
        self.number = next(PackedWeight._numbers)
        self._on_gpus: dict[int, _w4q.GpuLinear] = {}
        self._lock = threading.Lock()
        PackedWeight._known[self.number] = self

    @staticmethod
    def of(number: int) -> PackedWeight:
        return PackedWeight._known[number]

    def decode(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        name = str(dtype).removeprefix("torch.")
        return Array(self.packed.decode(name)).torch().to(device)

    def on_gpu(self, index: int) -> _w4q.GpuLinear:
        """Its planes in the memory of a GPU, in the layout of its kernels; they stay there."""
        found = self._on_gpus.get(index)
        if found is None:
            with self._lock:
                found = self._on_gpus.get(index)
                if found is None:
                    with torch.cuda.device(index):  # w4q and torch both remember which GPU is current
                        found = self._on_gpus[index] = _w4q.GpuLinear(self.packed, index)
        return found


_library = torch.library.Library("w4q", "DEF")
_library.define("linear(Tensor x, int weight) -> Tensor")


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As rows one behind the other, aligned as kernels want them."""
    rows = x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _cpu(x: torch.Tensor, weight: int) -> torch.Tensor:
    packed = PackedWeight.of(weight).packed
    rows = _rows(x, torch.float32)
    y = torch.empty(rows.shape[0], packed.out_features, dtype=torch.float32)
    if rows.shape[0] > 0:
        packed._multiply(rows.data_ptr(), rows.shape[0], y.data_ptr())
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.out_features)


def _cuda(x: torch.Tensor, weight: int) -> torch.Tensor:
    owner = PackedWeight.of(weight)
    rows = _rows(x, torch.float16)
    # f16 as it comes out of the kernel; other types by way of f32, whose range they have.
    fp32 = x.dtype != torch.float16
    y = torch.empty(rows.shape[0], owner.packed.out_features, device=x.device, dtype=torch.float32 if fp32 else torch.float16)
    if rows.shape[0] > 0:
        linear = owner.on_gpu(x.device.index)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            linear._multiply(rows.data_ptr(), rows.shape[0], y.data_ptr(), fp32, stream)
    return y.to(x.dtype).reshape(*x.shape[:-1], owner.packed.out_features)


def _shape(x: torch.Tensor, weight: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], PackedWeight.of(weight).packed.out_features)


def _remember(ctx, inputs, output) -> None:
    ctx.weight = inputs[1]


def _backward(ctx, gradient: torch.Tensor):
    """By x alone: what is packed is not trained."""
    owner = PackedWeight.of(ctx.weight)
    return gradient @ owner.decode(gradient.dtype, gradient.device), None


_library.impl("linear", _cpu, "CPU")
if has_cuda:
    _library.impl("linear", _cuda, "CUDA")
torch.library.register_fake("w4q::linear", _shape, lib=_library)
torch.library.register_autograd("w4q::linear", _backward, setup_context=_remember, lib=_library)


class Linear(torch.nn.Module):
    """y = x · Wᵀ + b with W packed. On a GPU by w4q's kernels (f16 activations; other types are converted) on the current
    stream; the planes go there when it is first used, or by to_gpu(). On the CPU by w4q's own product, which decodes some
    rows at a time in f32; cache=True decodes once instead, and keeps the weight in the type of the input.

    The planes stay with the checkpoint: state_dict() has the bias alone. Gradients by x, not by W.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, bias: torch.nn.Parameter | None = None, cache: bool = False):
        super().__init__()
        self.name = name
        self.owner = PackedWeight(checkpoint.linear(name))
        self.in_features = self.owner.packed.in_features
        self.out_features = self.owner.packed.out_features
        self.schemes = self.owner.packed.schemes
        self.cache = cache
        self._decoded: torch.Tensor | None = None
        self.register_parameter("bias", bias)

    def to_gpu(self, device: torch.device | int) -> Linear:
        """Brings the planes to a GPU now."""
        self.owner.on_gpu(torch.device("cuda", device).index if isinstance(device, int) else device.index or 0)
        return self

    def decode(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.owner.decode(dtype, torch.device(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache and x.device.type == "cpu":
            if self._decoded is None or self._decoded.dtype != x.dtype:
                self._decoded = self.decode(x.dtype)
            return torch.nn.functional.linear(x, self._decoded, self.bias)
        y = torch.ops.w4q.linear(x, self.owner.number)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={'+'.join(self.schemes)}, bias={self.bias is not None}"
