"""transformers decompresses a compressed-tensors folder, experts that it stacks among it, to what it loads of the decoded one:
check_parameters.py FOLDER DECODED"""

import json
import sys

import torch
import transformers


def load(folder, **options):
    with open(f"{folder}/config.json") as file:
        name = json.load(file)["architectures"][0]
    model, loading = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **options)
    if loading["missing_keys"]:
        sys.exit(f"  missing {sorted(loading['missing_keys'])[:3]}")
    return dict(model.named_parameters())


folder, decoded = sys.argv[1:]
peer = load(folder, dtype=torch.bfloat16, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
ours = load(decoded, dtype=torch.float32)
wrong = [name for name, weight in peer.items() if not torch.equal(weight, ours[name].to(weight.dtype))]
print(f"  {sum(weight.numel() for weight in peer.values())} weights, {'all equal' if not wrong else f'not those of {wrong[:3]}'}")
sys.exit(int(bool(wrong)))
