"""transformers loads a compressed-tensors folder through the compressed-tensors package and decompresses it:
check_compressed_tensors.py FOLDER EXPECTED DTYPE"""

import sys

from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import expected


def linears(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype,
                                                 quantization_config=CompressedTensorsConfig(run_compressed=False))
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            yield name, weight


dtype = getattr(expected.torch, sys.argv[3])
expected.compare(linears(sys.argv[1], dtype), expected.load(sys.argv[2]), dtype)
