"""Folders that other programs quantize from the same text as w4q: `scripts/formats --python` measures them.
    make_served.py BY FORMAT MODEL IDS SAMPLES LENGTH OUT
BY is llm-compressor, GPTQModel or AutoRound; FORMAT nvfp4, int4-g128 or int4-g32. IDS are token ids (uint16), of which SAMPLES
windows of LENGTH, spread evenly, calibrate. Of each program's ways those of its documentation; what was taken is printed."""

import pathlib
import sys

import numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def windows(path, samples, length):
    ids = numpy.fromfile(path, numpy.uint16).astype(numpy.int64)
    last = len(ids) - length
    return [torch.tensor(ids[last * i // max(samples - 1, 1) :][:length].copy()) for i in range(samples)]


def by_llm_compressor(kind, model, tokenizer, texts, out):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    data = Dataset.from_list([{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in texts])
    name, _, way = kind.partition(":")
    if name == "nvfp4":
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
                   "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    else:
        weights = {"num_bits": 4, "type": "int", "symmetric": "asym" not in way, "strategy": "group",
                   "group_size": int(name.split("-g")[1])}
    if "mse" in way:
        weights["observer"] = "nvfp4_expanded_mse" if name == "nvfp4" else "memoryless_mse"
    modifier = GPTQModifier if "gptq" in way else QuantizationModifier
    recipe = modifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    if way == "" and name == "nvfp4":
        recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])  # as its examples have it
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(texts), max_seq_length=len(texts[0]),
            shuffle_calibration_samples=False)
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def by_gptqmodel(kind, path, texts, out):
    from gptqmodel import GPTQModel, QuantizeConfig

    name, _, way = kind.partition(":")
    more = {"mse": 2.4} if "mse" in way else {}
    config = QuantizeConfig(bits=4, group_size=int(name.split("-g")[1]), sym="asym" not in way, **more)
    model = GPTQModel.load(path, config, device="cpu")
    model.quantize([{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in texts], batch_size=1)
    model.save(out)


def by_autoround(kind, path, tokenizer, texts, out):
    from auto_round import AutoRound

    name, _, way = kind.partition(":")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    data = [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in texts]
    if name == "nvfp4":
        scheme = {"scheme": "NVFP4", "act_bits": 16}
    else:
        scheme = {"bits": 4, "group_size": int(name.split("-g")[1]), "sym": "asym" not in way}
    rounds = AutoRound(model, tokenizer, dataset=data, seqlen=len(texts[0]), nsamples=len(texts), iters=200,
                       device_map="cpu", enable_torch_compile=False, **scheme)
    rounds.quantize_and_save(out, format="auto_round")


def main():
    by, kind, path, ids, samples, length, out = sys.argv[1:]
    texts = windows(ids, int(samples), int(length))
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    if by == "llm-compressor":
        by_llm_compressor(kind, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), tokenizer, texts, out)
    elif by == "GPTQModel":
        by_gptqmodel(kind, path, texts, out)
    else:
        by_autoround(kind, path, tokenizer, texts, out)
    print(sorted(p.name for p in pathlib.Path(out).rglob("*.json")))


main()
