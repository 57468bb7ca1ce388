"""The gguf package reads a file and decodes its blocks: check_gguf.py FILE EXPECTED. Expected is what w4q imports of the
same file; the rows of q and k, which GGUF has in another order, are left out."""

import sys

import torch
from gguf import GGUFReader, dequantize
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import get_tensor_name_map

import expected


def tensors(path, names):
    reader = GGUFReader(path)
    layers = int(reader.fields["llama.block_count"].contents())
    known = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    ours = {known.get_name(name, try_suffixes=(".weight", ".bias")): name for name in names}
    for tensor in reader.tensors:
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")) or tensor.name not in ours:
            continue
        yield ours[tensor.name], torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


wanted = expected.load(sys.argv[2])
expected.compare(tensors(sys.argv[1], list(wanted)), wanted, torch.float32)
