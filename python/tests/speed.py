"""Tokens a second through transformers' generate(): a model of the shape of Llama 3 8B with random weights, 16-bit and
packed, one prompt. Prints JSON.

    python python/tests/speed.py [--layers 32] [--schemes kbit4-b32-e4m4 int4-g128-f16 …] [--compile]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time

import torch
import transformers
import w4q


def make_model(folder: pathlib.Path, layers: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def seconds(work) -> float:
    torch.cuda.synchronize()
    begin = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - begin


def measure(folder: pathlib.Path, prompt: int, tokens: int, compiled: bool) -> dict:
    begin = time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cuda")
    loaded = time.monotonic() - begin
    free, total = torch.cuda.mem_get_info()
    ids = torch.randint(3, 128000, (1, prompt), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    if compiled:
        options["cache_implementation"] = "static"

    def generate(count: int) -> None:
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)

    generate(8)
    first = seconds(lambda: generate(1))
    whole = seconds(lambda: generate(tokens))
    result = {"load_seconds": round(loaded, 2), "gpu_gb": round((total - free) / 1e9, 2), "first_token_ms": round(first * 1e3, 1),
              "tokens_per_second": round((tokens - 1) / (whole - first), 1)}
    del model
    torch.cuda.empty_cache()
    return result


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--schemes", nargs="*", default=["kbit4-b32-e4m4", "int4-g128-f16"])
    arguments.add_argument("--prompt", type=int, default=512)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--compile", action="store_true", help="a static cache, which transformers compiles")
    options = arguments.parse_args()
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
              "layers": options.layers, "prompt": options.prompt, "tokens": options.tokens, "compiled": options.compile}
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        make_model(folder / "base", options.layers)
        torch.cuda.empty_cache()
        report["f16"] = measure(folder / "base", options.prompt, options.tokens, options.compile)
        for scheme in options.schemes:
            w4q.quantize(folder / "base", folder / "packed", scheme=scheme, overwrite=True)
            report[scheme] = measure(folder / "packed", options.prompt, options.tokens, options.compile)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
