"""from_pretrained() of w4q's folders on the CPU, held against w4q itself."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import w4q
from conftest import VARIANTS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def load(folder, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def perplexity(model, ids, context: int, windows: int) -> float:
    """As w4q verify --ids --ctx --windows: windows side by side, every token scored but the first of each."""
    loss, count = 0.0, 0
    for window in range(windows):
        row = torch.tensor([ids[window * context : (window + 1) * context]], device=model.device)
        with torch.no_grad():
            logits = model(row).logits.float()
        loss += torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum").item()
        count += context - 1
    return math.exp(loss / count)


def read_ids(model) -> list[int]:
    import array

    ids = array.array("H")
    ids.frombytes((model / "own" / "selfgen.ids.u16").read_bytes())
    return ids.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_w4qs(variant, make, model, tmp_path):
    """Both multiply in f32; 1e-3 is what verify grants to another implementation by default (docs/verify.md)."""
    loaded = load(make(variant))
    packed = [module for module in loaded.modules() if isinstance(module, w4q.Linear)]
    tables = sum("embed_tokens" in name for name in w4q.open(make(variant)).names)
    assert len(packed) + tables == len(w4q.open(make(variant)).names)
    ids = torch.tensor(read_ids(model)[:64])
    with torch.no_grad():
        logits = loaded(ids[None]).logits[0]
    safetensors.save_file({"ids": ids.int(), "logits_fp32": logits.contiguous()}, tmp_path / "reference.safetensors")
    report = w4q.verify(make(variant), reference=tmp_path / "reference.safetensors", max_diff=1e-3, device="cpu")
    assert report["passed"]


@pytest.mark.parametrize("variant", ["kbit4", "int4", "rotated4"])
def test_perplexity_is_verifys_within_a_thousandth(variant, make, model):
    context, windows = 128, 8
    ours = w4q.verify(make(variant), ids=model / "own" / "selfgen.ids.u16", ctx=context, windows=windows, device="cpu")
    theirs = perplexity(load(make(variant)), read_ids(model), context, windows)
    assert theirs == pytest.approx(ours["perplexity"]["perplexity"], rel=1e-3)


@pytest.mark.parametrize("cache", [False, True])
def test_generates(cache, make):
    config = transformers.AutoConfig.from_pretrained(make("kbit4"))
    config.quantization_config["cache_decoded"] = cache
    loaded = load(make("kbit4"), config=config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(make("kbit4"))
    ids = tokenizer("The history of", return_tensors="pt")
    tokens = loaded.generate(**ids, max_new_tokens=24, do_sample=False)
    assert tokens.shape[1] == ids["input_ids"].shape[1] + 24
    # Greedy steps with a cache are the argmax of the whole text decoded at once, but for near ties.
    with torch.no_grad():
        logits = loaded(tokens).logits[0]
    begin = ids["input_ids"].shape[1]
    for i in range(begin, tokens.shape[1]):
        row = logits[i - 1]
        assert row[tokens[0, i]] >= row.max() - 1e-3


def test_bfloat16_models(make, model):
    loaded = load(make("kbit4"), dtype=torch.bfloat16)
    full = load(make("kbit4"))
    ids = torch.tensor([read_ids(model)[:32]])
    with torch.no_grad():
        difference = torch.softmax(full(ids).logits, -1) - torch.softmax(loaded(ids).logits.float(), -1)
    assert difference.abs().max() < 0.1


def test_registers_where_transformers_comes_first(make):
    script = f"import transformers.quantizers.auto; import w4q; transformers.AutoModelForCausalLM.from_pretrained({str(make('kbit3'))!r})"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_importing_w4q_imports_neither(make):
    script = "import sys, w4q; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_runs_other_programs(make, tmp_path):
    """python -m w4q PROGRAM: what imports transformers without knowing of w4q."""
    (tmp_path / "program.py").write_text(
        "import sys; from transformers import AutoModelForCausalLM\n"
        "assert sys.argv[1:] == ['--flag'] and __name__ == '__main__'\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(make('kbit3'))!r}).model.layers[0].mlp.up_proj).__name__)\n"
    )
    command = [sys.executable, "-m", "w4q", "program", "--flag"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.strip() == "Linear"


def test_refuses_to_quantize_and_to_save(make, model, tmp_path):
    from w4q.transformers_quantizer import W4qConfig

    with pytest.raises(w4q.Error, match="cannot quantize"):
        transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=W4qConfig())
    with pytest.raises(ValueError):
        load(make("kbit4")).save_pretrained(tmp_path / "out")
