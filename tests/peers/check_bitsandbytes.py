"""bitsandbytes decodes every linear of a folder to what w4q does, and stores the same bytes of the 16-bit model where it
was rounded plainly: check_bitsandbytes.py FOLDER EXPECTED [MODEL]

Nested scales hang on the order in which torch adds up and spaces its table; of those the values are compared, and the
bytes of the codes under equal scales."""

import sys

import torch
from bitsandbytes import functional
from safetensors.torch import load_file

import expected

tensors = load_file(f"{sys.argv[1]}/model.safetensors")
marks = [name for name in tensors if ".quant_state.bitsandbytes__" in name]
states = {}
for mark in marks:
    weight = mark[: mark.index(".quant_state.")]
    parts = {name[len(weight) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{weight}.")}
    states[weight] = functional.QuantState.from_dict(parts, device=torch.device("cpu"))


def linears():
    for weight, state in states.items():
        state.dtype = torch.float32
        yield weight, functional.dequantize_4bit(tensors[weight], state)


expected.compare(linears(), expected.load(sys.argv[2]), torch.float32)

if len(sys.argv) > 3:
    source = load_file(f"{sys.argv[3]}/model.safetensors")
    wrong = 0
    for weight, state in states.items():
        codes, made = functional.quantize_4bit(
            source[weight].float(),
            blocksize=state.blocksize,
            quant_type=state.quant_type,
            compress_statistics=state.nested,
        )
        if state.nested:
            near = torch.allclose(made.offset, state.offset, rtol=1e-6) and torch.allclose(
                made.state2.code, state.state2.code, rtol=0, atol=1e-6
            )
            moved = int((made.absmax.int() - state.absmax.int()).abs().max())
            same = near and moved <= 1
        else:
            same = torch.equal(codes, tensors[weight]) and torch.equal(made.absmax, state.absmax)
            same = same and torch.equal(made.code, state.code)
        if not same:
            print(f"  {weight}: bitsandbytes stores other bytes")
            wrong += 1
    print(f"  {len(states)} weights, {wrong} that bitsandbytes stores otherwise")
    if wrong or not states:
        sys.exit(1)
