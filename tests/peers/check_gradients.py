"""torch's autograd has our gradients: check_gradients.py MODEL SUMS

SUMS is what gradient_sums (tests/peers/gradient_sums.cpp) wrote of MODEL: Σ g·gᵀ of every linear's outputs over some windows.
transformers computes the same windows in fp32, and autograd the gradients of the summed cross entropy. Both ways are fp32 in
another order: the Frobenius norm of the difference of two sums is at most 1e-4 of the norm. Measured on w4q-llama-tiny,
4 windows of 64 tokens, 4e-6; on families with random weights 2e-6, with delta nets 3e-5."""

import pathlib
import sys

import numpy
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

LIMIT = 1e-4


def sums_by_autograd(path, ids):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    sums, loss = {}, 0.0

    def keep(name):
        def on_output(_module, _inputs, output):
            output.register_hook(lambda gradient: add(name, gradient.flatten(0, -2).double()))

        return on_output

    def add(name, rows):
        sums[name] = sums.get(name, 0) + rows.T @ rows

    for name, module in model.named_modules():
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            module.register_forward_hook(keep(name))
    for window in ids:
        logits = model(window[None]).logits[0, :-1]
        nats = torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum")
        nats.backward()
        loss += nats.item()
    return sums, loss


def main():
    path, found = sys.argv[1:]
    with safe_open(pathlib.Path(found) / "model.safetensors", "np") as file:
        ours = {name: file.get_tensor(name) for name in file.keys()}
    ids = torch.tensor(ours.pop("ids").astype(numpy.int64))
    loss = ours.pop("loss")[0]
    sums, nats = sums_by_autograd(path, ids)
    assert abs(loss - nats) <= 1e-5 * nats, (loss, nats)
    # Routers, and experts that stand in one tensor, are no linears of torch's.
    one_has = [name for name in sums.keys() ^ ours.keys() if ".experts." not in name and not name.endswith(("gate", "router"))]
    assert not one_has, one_has
    worst, both = 0.0, sums.keys() & ours.keys()
    for name in both:
        theirs = sums[name]
        theirs = theirs.numpy()
        triangle = ours[name]
        whole = numpy.zeros_like(theirs)
        whole[numpy.triu_indices(len(theirs))] = triangle
        whole += numpy.triu(whole, 1).T
        apart = numpy.linalg.norm(whole - theirs) / numpy.linalg.norm(theirs)
        assert apart <= LIMIT, (name, apart)
        worst = max(worst, apart)
    print(f"  model: loss {loss / (ids.numel() - len(ids)):.6f} nats a token, {len(both)} linears, at most {worst:.1e} apart")


main()
