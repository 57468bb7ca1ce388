"""lm-evaluation-harness on a w4q folder: its rolling log-likelihood is w4q verify's perplexity."""

from __future__ import annotations

import array
import json
import math

import pytest
import w4q
from test_transformers import load, read_ids

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", ["kbit4", "int4", "rotated4"])
def test_perplexity_is_verifys_within_a_thousandth(variant, make, model, tmp_path):
    """Documents of 255 tokens: the harness puts BOS in front and scores them all, as verify does with bos=True, ctx=256."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(make(variant))
    ids, documents = read_ids(model), []
    for begin in range(0, len(ids) - 255, 255):
        text = tokenizer.decode(ids[begin : begin + 255])
        if tokenizer.encode(text, add_special_tokens=False) == ids[begin : begin + 255]:
            documents.append((text, ids[begin : begin + 255]))
        if len(documents) == 8:
            break
    assert len(documents) == 8
    (tmp_path / "ids.u16").write_bytes(array.array("H", sum((row for _, row in documents), [])).tobytes())
    (tmp_path / "text.json").write_text("\n".join(json.dumps({"text": text}) for text, _ in documents))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.json")}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    harness = HFLM(pretrained=load(make(variant)), tokenizer=tokenizer, batch_size=4, device="cpu", add_bos_token=False)
    results = lm_eval.simple_evaluate(model=harness, tasks=[task], bootstrap_iters=0)["results"]["local"]
    size = sum(len(text.encode()) for text, _ in documents)
    theirs = math.exp(math.log(results["byte_perplexity,none"]) * size / (8 * 255))
    ours = w4q.verify(make(variant), ids=tmp_path / "ids.u16", ctx=256, bos=True, device="cpu")
    assert theirs == pytest.approx(ours["perplexity"]["perplexity"], rel=1e-3)
