"""Humming's own schema takes every linear of a folder, with its shapes and types, and decodes it to what w4q does:
check_humming.py FOLDER EXPECTED DTYPE

Its operations on packed words run on GPUs only; those are done here, by their definition: a dense stream of codes, the
lowest bit first, and floats of a sign, exponent and mantissa."""

import json
import re
import sys

import torch
from humming import ops
from humming.schema import BaseWeightSchema
from safetensors.torch import load_file

import expected


def unpack_weight(words, bits):
    stream = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(32)) & 1
    codes = stream.reshape(*words.shape[:-1], -1, bits)
    return (codes << torch.arange(bits)).sum(-1).to(torch.int32)


def dequant_weight(codes, exponent_bits, mantissa_bits, is_signed):
    mantissa = (codes & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = torch.where(exponent > 0, 1 + mantissa, 2 * mantissa)
    value = torch.ldexp(normal, torch.clamp(exponent - bias, min=-bias))
    negative = is_signed & (codes >> (exponent_bits + mantissa_bits) & 1).bool()
    return torch.where(negative, -value, value).float()


torch.Tensor.cuda = lambda tensor, *_: tensor
ops.unpack_weight = unpack_weight
ops.dequant_weight = dequant_weight
folder, dtype = sys.argv[1], getattr(torch, sys.argv[3])
config = json.load(open(f"{folder}/config.json"))["quantization_config"]
tensors = load_file(f"{folder}/model.safetensors")
rules = [(re.compile(key[2:]), value) for key, value in config.get("dynamic", {}).items() if key.startswith("+:")]


def linears():
    for name, weight in tensors.items():
        if not name.endswith(".weight") or weight.dtype != torch.int32:
            continue
        path = name.removesuffix(".weight")
        settings = dict(config)
        for pattern, overrides in rules:
            if pattern.match(path):
                settings.update(overrides)
                break
        schema = BaseWeightSchema.from_config(settings)
        parts = {key.removeprefix(f"{path}."): value for key, value in tensors.items() if key.startswith(f"{path}.")}
        n, k, _, _ = schema.infer_shape(parts)
        schema.validate_tensors(parts, n, k, dtype)
        yield name, schema.dequant_tensors(parts).float()


expected.compare(linears(), expected.load(sys.argv[2]), torch.float32)
