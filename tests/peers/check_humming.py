"""Humming's own schema takes every linear of a folder, with its shapes and types, and decodes it to what w4q does:
check_humming.py FOLDER EXPECTED DTYPE

Its operations on packed words run on GPUs only; those are done here, by their definition: a dense stream of codes, the
lowest bit first, floats of a sign, exponent and mantissa, and the Hadamard matrix of testing/process_input.py. Weights
of rotated inputs are turned back by other sums than w4q's: they are equal within 2^-20 of the largest of a row."""

import json
import re
import sys

import torch
from humming import ops
from humming.schema import BaseWeightSchema
from safetensors.torch import load_file

import expected


def unpack_weight(words, bits, dtype=torch.int32):
    stream = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(32)) & 1
    codes = stream.reshape(*words.shape[:-1], -1, bits)
    return (codes << torch.arange(bits)).sum(-1).to(dtype)


def dequant_weight(codes, exponent_bits, mantissa_bits, is_signed):
    mantissa = (codes & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = torch.where(exponent > 0, 1 + mantissa, 2 * mantissa)
    value = torch.ldexp(normal, torch.clamp(exponent - bias, min=-bias))
    negative = is_signed & (codes >> (exponent_bits + mantissa_bits) & 1).bool()
    return torch.where(negative, -value, value).float()


def process_input(inputs, hadamard_block_size):
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while len(matrix) < hadamard_block_size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = inputs.double().reshape(-1, hadamard_block_size)
    return (blocks.matmul(matrix) / hadamard_block_size**0.5).float().reshape(inputs.shape), None, None


torch.Tensor.cuda = lambda tensor, *_: tensor
ops.unpack_weight = unpack_weight
ops.dequant_weight = dequant_weight
ops.process_input = process_input
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
        weight = schema.dequant_tensors(parts).float()
        yield name, nearest(weight, wanted[name]) if schema.hadamard_block_size > 1 else weight


def nearest(weight, ours):
    """`ours` where the two differ by no more than sums of other orders may."""
    allowed = ours.abs().amax(-1, keepdim=True) * 2**-20
    return torch.where((weight - ours).abs() <= allowed, ours, weight)


wanted = expected.load(sys.argv[2])
expected.compare(linears(), wanted, torch.float32)
