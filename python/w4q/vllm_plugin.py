"""vLLM of w4q's folders: a quantization method from outside its tree, which vLLM finds by the entry point of its plug-ins
(pyproject.toml). Linears become w4q.Linear's operation, several side by side where vLLM fuses them; all else is loaded by
vLLM as usual."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper

from ._checkpoint import Checkpoint, plane_names
from ._error import Error
from .linear import Linear


class W4qConfig(QuantizationConfig):
    """quantization_config of a w4q checkpoint."""

    def __init__(self, linears: list[str]):
        super().__init__()
        #: Where vLLM has them → as the files call them; wrapped models have other paths (apply_vllm_mapper).
        self.names = {name: name for name in linears}
        self._checkpoint: Checkpoint | None = None

    def get_name(self) -> str:
        return "w4q"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89  # what kernels are compiled for

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4qConfig:
        return cls(list(config.get("linears", {})))

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        """The planes of packed linears are w4q's to read: vLLM leaves them out."""
        return QuantizationConfig.get_cache_scale_mapper() | WeightsMapper(orig_to_new_regex={re.compile(plane_names): None})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        mapped = {}
        for name in self.names.values():
            for path in hf_to_vllm_mapper.apply_list([name]):
                mapped[path] = name
        self.names = mapped

    def checkpoint(self) -> Checkpoint:
        if self._checkpoint is None:
            folder = get_current_vllm_config().model_config.model
            if not os.path.isdir(folder):
                raise Error("bad_argument", 2, f"{folder}: no folder here", "vLLM loads w4q's planes from disk",
                            remedy="download it, and give the path")
            self._checkpoint = Checkpoint(folder)
        return self._checkpoint

    def packed_names(self, prefix: str) -> list[str]:
        """The linears of the files that the layer `prefix` is made of, in its order; none: it is not packed."""
        parent, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        paths = [f"{parent}.{part}" if parent else part for part in parts]
        packed = [self.names[path] for path in paths if path in self.names]
        if packed and len(packed) < len(paths):
            raise Error("unsupported", 3, f"{prefix}: vLLM fuses packed linears with others",
                        f"expected {', '.join(paths)}, got {', '.join(packed)}", "pack all of them, or none")
        return packed

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            names = self.packed_names(prefix)
            if names:
                return W4qLinearMethod(self, names)
            return None if isinstance(layer, ParallelLMHead) else _unpacked()
        if isinstance(layer, VocabParallelEmbedding):
            names = self.packed_names(prefix)
            return W4qEmbeddingMethod(self, names[0]) if names else None
        if any(path.startswith(prefix + ".") for path in self.names) and "MoE" in type(layer).__name__:
            raise Error("unsupported", 3, f"{prefix}: experts packed by w4q, which vLLM fuses","w4q repack FOLDER -o OUT --to hf16")
        return None


def _unpacked():
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return UnquantizedLinearMethod()


def _alone(prefix: str) -> None:
    ranks = get_tensor_model_parallel_world_size()
    if ranks != 1:
        raise Error("unsupported", 3, f"{prefix}: packed linears are not split over GPUs",
                    f"expected --tensor-parallel-size 1, got {ranks}")


class W4qLinearMethod(LinearMethodBase):
    def __init__(self, config: W4qConfig, names: list[str]):
        self.config = config
        self.names = names

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
                       params_dtype, **extra_weight_attrs) -> None:
        _alone(self.names[0])
        packed = [Linear(self.config.checkpoint(), name) for name in self.names]
        outputs, expected = [linear.out_features for linear in packed], list(output_partition_sizes)
        fits = outputs == expected or len(outputs) == 1 and outputs[0] <= sum(expected)  # vLLM pads vocabularies
        if not fits or any(linear.in_features != input_size for linear in packed):
            got = ", ".join(f"{linear.out_features} × {linear.in_features}" for linear in packed)
            raise Error("bad_file", 3, f"{', '.join(self.names)}: not of the shape that vLLM's model has",
                        f"expected {expected} × {input_size}, got {got}")
        layer.w4q = torch.nn.ModuleList(packed)

    def process_weights_after_loading(self, layer) -> None:
        device = get_current_vllm_config().device_config.device
        if device is not None and torch.device(device).type == "cuda":
            for linear in layer.w4q:
                linear.to_gpu(torch.device("cuda", torch.cuda.current_device()))

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = [linear(x) for linear in layer.w4q]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if bias is None else y + bias


class W4qEmbeddingMethod(UnquantizedEmbeddingMethod):
    """A packed table is decoded to the model's type: a lookup reads single rows."""

    def __init__(self, config: W4qConfig, name: str):
        super().__init__()
        self.config = config
        self.name = name

    def process_weights_after_loading(self, layer) -> None:
        _alone(self.name)
        weight = layer.weight
        decoded = self.config.checkpoint().decode(self.name, str(weight.dtype).removeprefix("torch.")).torch()
        with torch.no_grad():
            weight[: decoded.shape[0]].copy_(decoded)
        super().process_weights_after_loading(layer)


def register() -> None:
    """Called by vLLM in each of its processes."""
    if "w4q" not in QUANTIZATION_METHODS:
        register_quantization_config("w4q")(W4qConfig)
