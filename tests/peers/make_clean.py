"""Small checkpoints by the programs' own writers, to be held against verify: make_clean.py PROGRAM OUT MODEL...

PROGRAM is one of the functions below; each MODEL, a 16-bit folder, becomes OUT/PROGRAM-SCHEME-MODEL for every scheme that
the program has for it. A line a folder: "made NAME", or "not made NAME: why" where the program itself refuses."""

import json
import os
import shutil
import sys
import tempfile
import traceback

try:
    import torch
    import transformers
except ImportError:
    torch = None  # where mlx-lm is installed neither is needed

TOKENIZER = os.path.join(os.path.dirname(__file__), "../../testdata/w4q-llama-tiny")


def load(model):
    """The model in the class that its config names, which keeps towers."""
    config = transformers.AutoConfig.from_pretrained(model)
    loaded = getattr(transformers, config.architectures[0]).from_pretrained(model, dtype=torch.bfloat16)
    return loaded.eval()


def tokens(model, count=8, length=64):
    """Ids below the special ones, the same for everyone."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 300, (count, length), generator=generator)


def processor():
    """Any tokenizer: what is measured is measured on ids."""
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def finish(model, folder):
    """The tokenizer's files, where the program leaves them to its caller."""
    for name in os.listdir(model):
        if "token" in name and not os.path.exists(f"{folder}/{name}"):
            shutil.copy(f"{model}/{name}", folder)


def llmcompressor(model, scheme, folder):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    loaded = load(model)
    ignore = ["lm_head", "re:.*vis.*", "re:.*audio.*", "re:.*multi_modal.*", "re:.*mlp.gate$", "re:.*router.*", "re:.*block_sparse_moe.gate$",
              "re:.*shared_expert_gate$"]
    name, _, group = scheme.partition("-g")
    feedback = name.startswith("gptq.")
    name = name.removeprefix("gptq.")
    if group:
        from compressed_tensors.quantization import preset_name_to_scheme

        settings = preset_name_to_scheme(name, ["Linear"])
        settings.weights.group_size = int(group)
        keywords = {"config_groups": {"group_0": settings}}
    else:
        keywords = {"targets": "Linear", "scheme": name}
    modifier = (GPTQModifier if feedback else QuantizationModifier)(ignore=ignore, **keywords)
    data = {}
    if feedback or name in ("FP8", "NVFP4"):  # scales of activations, and Hessians, are measured
        ids = tokens(model)
        rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        data = {"dataset": rows, "num_calibration_samples": len(ids), "max_seq_length": 64, "processor": processor()}
    oneshot(model=loaded, recipe=modifier, **data)
    loaded.save_pretrained(folder, save_compressed=True)


def autoround(model, scheme, folder):
    from auto_round import AutoRound

    name, _, form = scheme.partition("@")
    keywords = {"sym": False} if name.endswith("_ASYM") else {}
    if not form.startswith("gguf"):
        keywords["scheme"] = name.removesuffix("_ASYM")
    if name in ("NVFP4", "FP8_STATIC"):  # scales of activations are measured
        keywords["dataset"] = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens(model)]
    source = load(model) if "vision" not in model else model
    maker = AutoRound(source, processor(), iters=0, disable_opt_rtn=True, nsamples=4, seqlen=32, device_map="cpu", **keywords)
    maker.quantize_and_save(folder + ".outer", format=form)
    inner = [entry.path for entry in os.scandir(folder + ".outer") if entry.is_dir()]
    shutil.move(inner[0] if inner else folder + ".outer", folder)
    shutil.rmtree(folder + ".outer", ignore_errors=True)
    for name in os.listdir(folder):
        if ("token" in name or "chat_template" in name) and not os.path.exists(f"{model}/{name}"):
            os.remove(f"{folder}/{name}")  # what was lent


def modelopt(model, scheme, folder):
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    loaded = load(model)
    ids = tokens(model)

    def forward(changed):
        for row in ids:
            changed(input_ids=row[None])

    quantization.quantize(loaded, getattr(quantization, scheme), forward)
    export_hf_checkpoint(loaded, export_dir=folder)


def gptqmodel(model, scheme, folder):
    import gptqmodel as package
    from gptqmodel import GPTQModel, QuantizeConfig

    package._default_cpu_workers = lambda: 4  # its pool wants more than there are on a small machine

    method, bits, group, *words = scheme.split("-")
    settings = QuantizeConfig(bits=int(bits), group_size=int(group), sym="asym" not in words, desc_act="order" in words,
                              quant_method="awq" if method == "awq" else "gptq",
                              format={"v1": "gptq", "v2": "gptq_v2", "awq": "gemm"}[method], device="cpu", offload_to_disk=False)
    maker = GPTQModel.load(model, settings)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens(model, 16)]
    maker.quantize(rows, batch_size=1, tokenizer=processor(), calibration_data_min_length=1)
    maker.save(folder)


def transformers_(model, scheme, folder):
    settings = {
        "nf4": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "fp4": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        "nf4-nested": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
        "fp8": lambda: transformers.FineGrainedFP8Config(),
        "mxfp4": lambda: transformers.Mxfp4Config(),
        "bf16": lambda: None,
    }[scheme]()
    config = transformers.AutoConfig.from_pretrained(model)
    loaded = getattr(transformers, config.architectures[0]).from_pretrained(model, dtype=torch.bfloat16, quantization_config=settings)
    loaded.save_pretrained(folder)


def mlx(model, scheme, folder):
    import mlx_lm

    words = scheme.split("-")
    with tempfile.TemporaryDirectory() as source:  # it wants a tokenizer, too
        for name in os.listdir(model):
            os.symlink(os.path.abspath(f"{model}/{name}"), f"{source}/{name}")
        lent = [name for name in os.listdir(TOKENIZER) if "token" in name and not os.path.exists(f"{source}/{name}")]
        for name in lent:
            shutil.copy(f"{TOKENIZER}/{name}", source)
        if words[0].startswith("mixed"):
            settings = {"quant_predicate": words[0], "q_group_size": 64}
        else:
            settings = {"q_mode": words[0], "q_bits": int(words[1]), "q_group_size": int(words[2])}
        mlx_lm.convert(source, folder, quantize=True, **settings)
        for name in lent + ["chat_template.jinja", "tokenizer.json"]:
            if not os.path.exists(f"{model}/{name}") and os.path.exists(f"{folder}/{name}"):
                os.remove(f"{folder}/{name}")


PROGRAMS = {
    "mlx": (mlx, ["affine-2-64", "affine-3-64", "affine-4-32", "affine-4-64", "affine-5-64", "affine-6-64", "affine-8-64", "mxfp4-4-32",
                  "mxfp8-8-32", "nvfp4-4-16", "mixed_2_6", "mixed_3_4", "mixed_4_6"]),
    "autoround": (autoround, ["W4A16G32@auto_round", "W4A16G32_ASYM@auto_round", "W4A16G32@auto_gptq", "W4A16G32_ASYM@auto_gptq",
                              "W4A16G32_ASYM@auto_awq", "W2A16G32@auto_round", "W3A16G32@auto_gptq", "W8A16G32@auto_gptq",
                              "W4A16G32@llm_compressor", "NVFP4@llm_compressor", "MXFP4@llm_compressor", "MXFP8@llm_compressor",
                              "FP8_BLOCK@llm_compressor", "FPW8A16@llm_compressor", "FP8_STATIC@auto_round", "Q@gguf:q4_0", "Q@gguf:q8_0",
                              "Q@gguf:q4_k_m", "Q@gguf:q6_k"]),
    "modelopt": (modelopt, ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "NVFP4_DEFAULT_CFG",
                            "W4A16_NVFP4_CFG", "NVFP4_MLP_ONLY_CFG", "NVFP4_EXPERTS_ONLY_CFG", "NVFP4_AWQ_LITE_CFG", "MXFP8_DEFAULT_CFG",
                            "MXFP4_DEFAULT_CFG", "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "INT8_SMOOTHQUANT_CFG"]),
    "gptqmodel": (gptqmodel, ["v1-4-32", "v2-4-32", "v2-4-32-asym", "v1-4-32-order", "v1-8-32", "v2-3-32", "v2-2-32", "awq-4-32-asym"]),
    "transformers": (transformers_, ["nf4", "fp4", "nf4-nested", "int8", "fp8", "mxfp4", "bf16"]),
    "llmcompressor": (llmcompressor, ["W4A16-g32", "W4A16_ASYM-g32", "W2A16-g32", "W3A16-g32", "W5A16-g32", "W6A16-g32", "W7A16-g32", "W8A16-g32",
                                      "W8A8", "W4A8-g32", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4",
                                      "MXFP8A16", "MXFP8", "gptq.W4A16-g32", "gptq.W4A16_ASYM-g32"]),
}


def main():
    program, out, *models = sys.argv[1:]
    make, schemes = PROGRAMS[program]
    only = os.environ.get("SCHEMES")
    for scheme in only.split(",") if only else schemes:
        for model in models:
            name = f"{program}-{scheme}-{os.path.basename(model)}"
            folder = os.path.join(out, name)
            if os.path.exists(folder):
                continue
            try:
                if torch is not None:
                    torch.manual_seed(0)
                make(model, scheme, folder + ".part")
                finish(model, folder + ".part")
                os.rename(folder + ".part", folder)
                print(f"made {name}", flush=True)
            except Exception as error:
                shutil.rmtree(folder + ".part", ignore_errors=True)
                if os.environ.get("TRACE"):
                    traceback.print_exc()
                print(f"not made {name}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}", flush=True)


if __name__ == "__main__":  # AutoRound starts processes, which read this file again
    main()
