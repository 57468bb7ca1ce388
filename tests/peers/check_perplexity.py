"""A peer computes the model that w4q computes: check_perplexity.py FOLDER|FILE IDS PROMPT GENERATED REPORT [DECODED|mlx]

GENERATED is `w4q generate --json` of the ids PROMPT, REPORT `w4q verify --json` over windows of 512 of IDS. transformers
loads a folder; libllama, which the package xllamacpp holds, a GGUF file, of which DECODED is `w4q repack --to hf-f32`; mlx-lm a folder, where that word stands.
Perplexity is ours within 0.3 % for folders, and within 0.5 % for files; greedy text is ours.

llama.cpp rounds the inputs of products with blocks of 256 to 8 bits, which moves the perplexity of a small model by up to
0.8 %. So files are held against the decoded weights with inputs rounded as it does, too, and one of the two has to agree;
how far that moves logits is how far apart two tokens may be that are exchanged in greedy text."""

import ctypes
import json
import math
import sys

import numpy
import torch

WINDOW = 512
# Logits in 16 bits of a magnitude up to 32 are this far apart at most.
TIE = 0.25


class Folder:
    """transformers' logits in fp32, of weights in bf16 as it decompresses them, or of fp32."""

    limit = 0.003

    def __init__(self, path):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path)
        of_text = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}.get(config.model_type)
        if of_text:  # of text they compute the same, and stand in no list of causal models
            stated = {key: value for key, value in config.to_dict().items() if key != "model_type"}
            config = AutoConfig.for_model(of_text, **stated)
        if (getattr(config, "pad_token_id", None) or 0) >= getattr(config, "vocab_size", math.inf):
            config.pad_token_id = None  # what transformers assumes of the family, not of a small vocabulary
        stated = getattr(config, "quantization_config", None)
        options = {}
        if stated is not None and stated.get("quant_method") == "compressed-tensors":
            from transformers import CompressedTensorsConfig

            options["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
        dtype = torch.bfloat16 if options else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, **options).float()

    def logits(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].double()


class Mlx:
    """mlx-lm's, of AWQ's words, with f16 in between."""

    limit = 0.003

    def __init__(self, path):
        import mlx.core
        from mlx_lm import load

        self.core = mlx.core
        self.model, _ = load(path)

    def logits(self, ids):
        values = self.model(self.core.array([ids]))[0].astype(self.core.float32)
        return torch.from_numpy(numpy.array(values)).double()


class Opaque(ctypes.Structure):
    """Parameters that the library fills by itself, and takes as they are: larger than they are in any version."""

    _fields_ = [("bytes", ctypes.c_char * 1024)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    ]


class File:
    """llama.cpp's, through its C interface: the library is the package's extension module. A context of 512 tokens is the
    library's own default."""

    limit = 0.005

    def __init__(self, path):
        import xllamacpp

        library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        library.llama_log_set(self.quiet, None)
        library.llama_backend_init()
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab", "llama_get_memory"):
            getattr(library, name).restype = ctypes.c_void_p
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(library, name).restype = Opaque
        library.llama_batch_init.restype = Batch
        library.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        model = library.llama_model_load_from_file(ctypes.c_char_p(path.encode()), library.llama_model_default_params())
        assert model, "llama.cpp does not load it"
        vocabulary = ctypes.c_void_p(library.llama_model_get_vocab(ctypes.c_void_p(model)))
        self.width = library.llama_vocab_n_tokens(vocabulary)
        self.context = ctypes.c_void_p(library.llama_init_from_model(ctypes.c_void_p(model), library.llama_context_default_params()))
        self.library = library

    def logits(self, ids):
        memory = ctypes.c_void_p(self.library.llama_get_memory(self.context))
        self.library.llama_memory_clear(memory, ctypes.c_bool(True))
        batch = self.library.llama_batch_init(len(ids), 0, 1)
        batch.tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.position[at], batch.sequences[at], batch.wanted[at] = token, at, 1, 1
            batch.sequence[at][0] = 0
        assert self.library.llama_decode(self.context, batch) == 0
        values = self.library.llama_get_logits(self.context)
        return torch.from_numpy(numpy.ctypeslib.as_array(values, (len(ids), self.width)).copy()).double()


def round_inputs(module, inputs):
    """As blocks of Q8_K: 8 bits over 256, the scale from the value of the largest magnitude."""
    blocks = inputs[0].reshape(-1, 256)
    most = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = -127 / most
    rounded = torch.where(most == 0, 0, torch.round(blocks * step).clamp(max=127) / step)
    return (rounded.reshape(inputs[0].shape),)


def rounded_folder(path):
    folder = Folder(path)
    for module in folder.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_inputs)
    return folder


def perplexity(model, ids, windows):
    total, count = 0.0, 0
    for begin in range(0, windows * WINDOW, WINDOW):
        window = ids[begin : begin + WINDOW]
        scores = torch.log_softmax(model.logits(window), -1)
        for at in range(len(window) - 1):
            total -= float(scores[at, window[at + 1]])
            count += 1
    return math.exp(total / count)


def ids_of(path):
    return numpy.fromfile(path, numpy.uint16).astype(int).tolist()


path, ids, prompt, generated, report, *decoded = sys.argv[1:]
peer = Mlx(path) if decoded == ["mlx"] else File(path) if decoded else Folder(path)
decoded = [] if decoded == ["mlx"] else decoded
expected, made = json.load(open(report))["perplexity"], json.load(open(generated))
theirs = perplexity(peer, ids_of(ids), expected["windows"])
wanted = [expected["perplexity"]]
text = ids_of(prompt) + made["ids"]
logits, tie = peer.logits(text), TIE
if decoded:
    rounded = rounded_folder(decoded[0])
    wanted.append(perplexity(rounded, ids_of(ids), expected["windows"]))
    tie += 2 * float((rounded.logits(text) - Folder(decoded[0]).logits(text)).abs().max())
gaps = [float(logits[at - 1].max() - logits[at - 1, text[at]]) for at in range(len(ids_of(prompt)), len(text))]
differences = [abs(theirs / value - 1) for value in wanted]
print(f"  model: perplexity {theirs:.4f}, ours " + " and ".join(f"{value:.4f} ({100 * part:.3f} %)" for value, part in zip(wanted, differences))
      + f"; greedy text of {len(gaps)} tokens " + ("is ours" if max(gaps) == 0 else f"is ours but for ties of {max(gaps):.2f}, {tie:.2f} expected at most"))
sys.exit(int(min(differences) > peer.limit or max(gaps) > tie))
