"""AutoAWQ's own dequantize_gemm on an awq-gemm folder: check_awq.py FOLDER EXPECTED"""

import importlib.util
import json
import sys

from safetensors.torch import load_file

import expected


def packing_utils():
    """The module alone: the package around it asks for releases of transformers that are gone."""
    package = importlib.util.find_spec("awq").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("packing_utils", f"{package}/utils/packing_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linears(folder):
    dequantize = packing_utils().dequantize_gemm
    config = json.load(open(f"{folder}/config.json"))["quantization_config"]
    tensors = load_file(f"{folder}/model.safetensors")
    for name in tensors:
        if not name.endswith(".qweight"):
            continue
        linear = name.removesuffix(".qweight")
        weight = dequantize(tensors[name], tensors[f"{linear}.qzeros"], tensors[f"{linear}.scales"], config["bits"],
                            config["group_size"])
        yield f"{linear}.weight", weight.t().contiguous()


expected.compare(linears(sys.argv[1]), expected.load(sys.argv[2]), expected.torch.float16)
