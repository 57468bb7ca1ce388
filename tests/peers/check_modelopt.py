"""ModelOpt's own tensors decode a folder to what w4q does: check_modelopt.py FOLDER EXPECTED. It loads folders in servers
only, so that its classes are given the tensors that their export writes, by its names, types and shapes."""

import json
import sys

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file

import expected

folder = sys.argv[1]
tensors = load_file(f"{folder}/model.safetensors")
stated = json.load(open(f"{folder}/hf_quant_config.json"))["quantization"]


def decoded(algorithm, weight, scale, factor):
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(scale=scale, double_scale=factor, block_sizes={-1: 16})
    if algorithm == "MXFP8":
        return MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
    fp8 = FP8QTensor(weight.shape, torch.float32, weight)
    if algorithm == "FP8_PB_WO":
        assert scale.dim() == 4, "scales of blocks have four dimensions"
        return fp8.dequantize(scale=scale.squeeze(1).squeeze(-1), block_sizes={-1: 128, -2: 128})
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        assert scale.dim() == 1, "scales of rows have one dimension"
        return fp8.dequantize(scale=scale[:, None])
    assert algorithm == "FP8" and scale.dim() == 0, f"{algorithm}, scales {tuple(scale.shape)}"
    return fp8.dequantize(scale=scale)


def linears():
    for name, weight in tensors.items():
        path = name.removesuffix(".weight")
        if f"{path}.weight_scale" not in tensors or path == name:
            continue
        algorithm = stated["quant_algo"]
        if algorithm == "MIXED_PRECISION":
            algorithm = stated["quantized_layers"][path]["quant_algo"]
        yield name, decoded(algorithm, weight, tensors[f"{path}.weight_scale"], tensors.get(f"{path}.weight_scale_2"))


expected.compare(linears(), expected.load(sys.argv[2]), torch.float32)
