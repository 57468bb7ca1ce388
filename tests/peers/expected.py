"""What w4q decodes a checkpoint to: a folder of 32-bit weights, and how peers' weights are compared with it."""

import sys

import torch
from safetensors.torch import load_file


def load(folder):
    """Name of a parameter -> float32 tensor, from the folder that `w4q repack GGUF --to hf-f32` wrote."""
    return load_file(f"{folder}/model.safetensors")


def compare(peer, expected, dtype):
    """Exits with 1 unless every (name, tensor) of `peer` has the values of `expected`, rounded once to `dtype`."""
    count = 0
    wrong = 0
    for name, weight in peer:
        wanted = expected[name].to(dtype)
        weight = weight.detach()
        if weight.dtype != dtype or weight.shape != wanted.shape:
            print(f"  {name}: {weight.dtype} {tuple(weight.shape)}, expected {dtype} {tuple(wanted.shape)}")
            wrong += 1
        elif not torch.equal(weight, wanted):
            different = int((weight != wanted).sum())
            print(f"  {name}: {different} of {wanted.numel()} weights differ")
            wrong += 1
        count += wanted.numel()
    print(f"  {count} weights, {'all equal' if wrong == 0 else f'{wrong} tensors are not'}")
    if wrong or count == 0:
        sys.exit(1)
