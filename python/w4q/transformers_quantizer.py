"""AutoModelForCausalLM.from_pretrained() of w4q's folders: linears become w4q.Linear, all else is loaded as usual."""

from __future__ import annotations

import os
import re

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._checkpoint import Checkpoint, plane_names
from ._error import Error
from .linear import Linear, has_cuda

@register_quantization_config("w4q")
class W4qConfig(QuantizationConfigMixin):
    """quantization_config of a w4q checkpoint. cache_decoded: on the CPU weights are decoded once and kept (Linear)."""

    def __init__(self, linears: dict | None = None, cache_decoded: bool = False, **others):
        self.quant_method = "w4q"
        self.linears = linears or {}
        self.cache_decoded = cache_decoded
        for name, value in others.items():
            if name != "quant_method":
                setattr(self, name, value)


@register_quantizer("w4q")
class W4qQuantizer(HfQuantizer):
    def validate_environment(self, *args, **kwargs):
        if not self.pre_quantized:
            raise Error("unsupported", 3, "transformers cannot quantize with w4q", remedy="w4q.quantize(MODEL, OUT, …)")

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        self._checkpoint = Checkpoint(_folder(model, checkpoint_files))
        self._tables: list[tuple[str, str]] = []  # embedding tables, which are decoded: a lookup reads single rows
        for name in self._checkpoint.names:
            self._replace(model, name)
        add = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(add or ()), plane_names}
        missing = {re.escape(path + ".weight") + "$" for _, path in self._tables}
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *missing}
        return model

    def _replace(self, model, name: str) -> None:
        path = _module_path(model, name)
        module = model.get_submodule(path)
        if isinstance(module, torch.nn.Embedding):
            self._tables.append((name, path))
            return
        parent, _, child = path.rpartition(".")
        linear = Linear(self._checkpoint, name, module.bias, cache=self.quantization_config.cache_decoded)
        setattr(model.get_submodule(parent), child, linear)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name, path in self._tables:
            weight = model.get_submodule(path).weight
            with torch.no_grad():
                decoded = self._checkpoint.decode(name, str(weight.dtype).removeprefix("torch.")).torch()
                weight.copy_(decoded)
        devices = {parameter.device for parameter in model.parameters()}
        device = devices.pop() if len(devices) == 1 else None  # of several, each linear goes where its input is
        if device is not None and device.type == "cuda" and has_cuda:
            for module in model.modules():
                if isinstance(module, Linear):
                    module.to_gpu(device)
        return model

    def is_serializable(self, *args, **kwargs) -> bool:
        return False  # the folder is the model: copy it

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside it

    @property
    def is_compileable(self) -> bool:
        return True


def _folder(model, files) -> str:
    """Of the weights: a local folder, or a snapshot in the hub's cache."""
    if files:
        return os.path.dirname(files[0])
    return model.name_or_path


def _module_path(model, name: str) -> str:
    """Where the linear `name` of the files stands in the model: wrapped models have longer paths."""
    modules = dict(model.named_modules())
    if isinstance(modules.get(name), (torch.nn.Linear, torch.nn.Embedding)):
        return name
    tail = name.removeprefix("model.")
    found = [path for path, module in modules.items()
             if path.endswith("." + tail) and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))]
    if len(found) == 1:
        return found[0]
    raise Error("unsupported", 3, f"{name}: no linear of {type(model).__name__}, as transformers builds it",
                remedy='w4q.repack(FOLDER, OUT, to="hf16") decodes the model')
