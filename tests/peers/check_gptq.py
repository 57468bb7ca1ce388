"""GPTQModel loads a gptq-v1 or gptq-v2 folder and decodes every linear: check_gptq.py FOLDER EXPECTED"""

import sys

from gptqmodel import BACKEND, GPTQModel
from gptqmodel.nn_modules.qlinear.torch import TorchLinear

import expected


def linears(folder):
    model = GPTQModel.load(folder, backend=BACKEND.TORCH, device="cpu", dtype=expected.torch.float16)
    for name, module in model.model.named_modules():
        if isinstance(module, TorchLinear):
            yield f"{name}.weight", super(TorchLinear, module).dequantize_weight().t().contiguous()


expected.compare(linears(sys.argv[1]), expected.load(sys.argv[2]), expected.torch.float16)
