"""AutoRound's loader, by way of transformers, loads a folder: every linear gives the rows of its weights where its inputs are
unit vectors: check_auto_round.py FOLDER EXPECTED. It computes in f16, whatever is asked for."""

import sys

from transformers import AutoModelForCausalLM

import expected


def linears(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=expected.torch.float16)
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            inputs = expected.torch.eye(module.infeatures, dtype=expected.torch.float16)
            yield f"{name}.weight", module(inputs).t().contiguous()


expected.compare(linears(sys.argv[1]), expected.load(sys.argv[2]), expected.torch.float16)
