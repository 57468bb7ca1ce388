"""A folder of a model with random weights, as transformers writes it: make_random.py CONFIG OUT. Norms scale by about one, biases
lie around zero, so that every tensor says something; the vocabulary is at least 300."""

import json
import os
import sys

import torch
import transformers

source, out = sys.argv[1:]
with open(source) as file:
    stated = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **json.load(file)}
name = stated["architectures"][0]
torch.manual_seed(1)
around = 0.0 if name.startswith(("Gemma2", "Gemma3", "Qwen3_5", "Qwen3Next")) else 1.0  # norms of 1 + w
model = getattr(transformers, name)(transformers.AutoConfig.for_model(**stated)).float()
with torch.no_grad():
    for key, value in model.named_parameters():
        spread = 0.2 if value.dim() < 2 else value.shape[-1] ** -0.5
        middle = 1.0 if key.endswith("linear_attn.norm.weight") else around
        value.normal_(middle if key.endswith("norm.weight") else 0.0, spread)
model.to(torch.bfloat16).save_pretrained(out)
# What the caller stated, not what the library makes of it.
with open(os.path.join(out, "config.json"), "w") as file:
    json.dump(stated, file, indent=2)
print(f"  model {name}")
