"""What transformers computes of a folder, as w4q verify --reference reads it: make_reference.py FOLDER OUT"""

import json
import sys

import torch
import transformers
from safetensors.torch import save_file

folder, out = sys.argv[1:]
with open(f"{folder}/config.json") as file:
    name = json.load(file)["architectures"][0]
model, loading = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
if loading["missing_keys"] or loading["unexpected_keys"]:
    sys.exit(f"  missing {sorted(loading['missing_keys'])}, unexpected {sorted(loading['unexpected_keys'])}")
ids = torch.randint(3, 300, (96,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
with torch.no_grad():
    logits = model.eval()(input_ids=ids.long()[None], use_cache=False).logits[0]
save_file({"ids": ids, "logits_fp32": logits.float().contiguous()}, out)
print(f"  model {name}, {logits.numel()} logits")
