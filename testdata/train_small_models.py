#!/usr/bin/env python3
"""Trains w4q-mixture-tiny (Qwen3-MoE) and w4q-hybrid-tiny (Qwen3.5: delta nets and attention) from w4q-llama-tiny.

  train_small_models.py mixture|hybrid TEACHER OUT [--seconds S] [--ids FILE.u16]

The teacher writes the text, at temperature 1, and the student learns its distributions (cross entropy against all logits);
no other text is read. Needs torch and one GPU. OUT gets config.json, model.safetensors in bf16, the teacher's tokenizer,
and reference.safetensors: 64 token ids and the student's logits, fp32 from the bf16 weights. With --ids the perplexity on
the first 48 windows of 512 tokens is printed.
"""
import argparse, json, math, os, shutil, struct, time

import torch
import torch.nn.attention
import torch.nn.functional as F

SEED, VOCAB, LENGTH, BATCH = 1234, 1024, 512, 64
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}


def load(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = torch.frombuffer(bytearray(data[8 + size + begin:8 + size + end]), dtype=TYPES[entry["dtype"]])
        tensors[name] = raw.reshape(entry["shape"])
    return tensors


def save(path, tensors):
    header, chunks, at = {}, [], 0
    names = {kind: name for name, kind in TYPES.items()}
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        raw = tensor.view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(tensor)
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        chunks.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def rms(x, weight, eps):
    return weight * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)


class Rope:
    def __init__(self, pairs, theta, device, length=4096):
        angles = torch.arange(length).float()[:, None] * theta ** (-torch.arange(pairs).float() / pairs)[None]
        self.cos, self.sin, self.pairs = angles.cos().to(device), angles.sin().to(device), pairs

    def turn(self, x, first=0):  # [b, heads, t, dim]
        cos, sin = (table[first:first + x.shape[2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b, rest = x[..., :self.pairs], x[..., self.pairs:2 * self.pairs], x[..., 2 * self.pairs:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Teacher:
    """w4q-llama-tiny, with a cache of keys and values while it writes."""

    def __init__(self, folder, device):
        self.c = json.load(open(os.path.join(folder, "config.json")))
        self.w = {name: t.to(device) for name, t in load(os.path.join(folder, "model.safetensors")).items()}
        self.rope = Rope(self.c["head_dim"] // 2, self.c["rope_theta"], device)
        self.device = device

    def __call__(self, ids, cache=None, first=0):
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        x = w["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = rms(x, w[at + "input_layernorm.weight"], eps)
            q, k, v = (heads_of(h @ w[at + f"self_attn.{p}_proj.weight"].T, n) for p, n in
                       (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])))
            q, k = self.rope.turn(q, first), self.rope.turn(k, first)
            if cache is not None:
                keys, values = cache[i]
                keys[:, :, first:first + k.shape[2]], values[:, :, first:first + k.shape[2]] = k, v
                k, v = keys[:, :, :first + k.shape[2]], values[:, :, :first + k.shape[2]]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
            x = x + mixed.transpose(1, 2).flatten(2) @ w[at + "self_attn.o_proj.weight"].T
            h = rms(x, w[at + "post_attention_layernorm.weight"], eps)
            x = x + (F.silu(h @ w[at + "mlp.gate_proj.weight"].T) * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        return rms(x, w["model.norm.weight"], eps) @ w["model.embed_tokens.weight"].T

    @torch.no_grad()
    def write(self, sequences, length):
        c = self.c
        shape = (sequences, c["num_key_value_heads"], length, c["head_dim"])
        cache = [(torch.zeros(shape, dtype=torch.bfloat16, device=self.device), torch.zeros(shape, dtype=torch.bfloat16, device=self.device))
                 for _ in range(c["num_hidden_layers"])]
        ids = torch.full((sequences, length), c["bos_token_id"], device=self.device)
        for at in range(length - 1):
            logits = self(ids[:, at:at + 1], cache, at)[:, 0].float()
            ids[:, at + 1] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        return ids


class Linear(torch.nn.Module):
    def __init__(self, n, k, scale=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, k) * 0.02 * scale)

    def forward(self, x):
        return x @ self.weight.T.to(x.dtype)


class Norm(torch.nn.Module):
    """RMSNorm; with offset 1 what is stored is the difference to one."""

    def __init__(self, size, offset, eps=1e-6):
        super().__init__()
        self.weight, self.offset, self.eps = torch.nn.Parameter(torch.full((size,), 1.0 - offset)), offset, eps

    def forward(self, x):
        return rms(x, (self.weight + self.offset).to(x.dtype), self.eps)


class Attention(torch.nn.Module):
    def __init__(self, c, rope):
        super().__init__()
        self.c, self.rope, offset = c, rope, c["offset"]
        hidden, width, keys = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        self.q_proj = Linear(width * (2 if c["gated"] else 1), hidden)
        self.k_proj, self.v_proj = Linear(keys, hidden), Linear(keys, hidden)
        self.o_proj = Linear(hidden, width, c["depth_scale"])
        self.q_norm, self.k_norm = Norm(c["head_dim"], offset), Norm(c["head_dim"], offset)

    def forward(self, x):
        c = self.c
        q, gate = heads_of(self.q_proj(x), c["num_attention_heads"]), None
        if c["gated"]:
            q, gate = q.chunk(2, -1)
        k, v = heads_of(self.k_proj(x), c["num_key_value_heads"]), heads_of(self.v_proj(x), c["num_key_value_heads"])
        q, k = self.rope.turn(self.q_norm(q)), self.rope.turn(self.k_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(torch.nn.Module):
    def __init__(self, c, inner):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(inner, c["hidden_size"]), Linear(inner, c["hidden_size"])
        self.down_proj = Linear(c["hidden_size"], inner, c["depth_scale"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(torch.nn.Module):
    """All experts see all rows, and their shares are zero where they were not chosen: small models only."""

    def __init__(self, c):
        super().__init__()
        self.chosen = c["num_experts_per_tok"]
        self.gate = Linear(c["num_experts"], c["hidden_size"])
        self.experts = torch.nn.ModuleList(Mlp(c, c["moe_intermediate_size"]) for _ in range(c["num_experts"]))
        self.balance = 0.0

    def forward(self, x):
        scores = (x.float() @ self.gate.weight.T).softmax(-1)
        best, places = scores.topk(self.chosen, -1)
        shares = torch.zeros_like(scores).scatter(-1, places, best / best.sum(-1, keepdim=True))
        self.balance = len(self.experts) * ((shares > 0).float().mean((0, 1)) * scores.mean((0, 1))).sum() / self.chosen
        return sum(shares[..., i, None].to(x.dtype) * expert(x) for i, expert in enumerate(self.experts))


def delta_rule(q, k, v, g, beta, size=64):
    """S <- e^g S; S <- S + k (x) beta (v - S^T k); out = S^T q, for chunks at a time: within a chunk the updates are the
    solution of a triangular system. [b, heads, t, dim]; g and beta [b, heads, t]; fp32."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    cut = lambda x: x.unflatten(2, (-1, size))
    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta)[..., None]
    g = cut(g).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    eye = torch.eye(size, device=q.device)
    system = eye + (beta * k @ k.transpose(-1, -2) * decay).tril(-1)
    new_values = torch.linalg.solve_triangular(system, beta * v, upper=False)
    old_keys = torch.linalg.solve_triangular(system, beta * k * g[..., None].exp(), upper=False)
    inside = q @ k.transpose(-1, -2) * decay
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)
    outs = []
    for i in range(q.shape[2]):
        values = new_values[:, :, i] - old_keys[:, :, i] @ state
        grown = g[:, :, i]
        outs.append(q[:, :, i] * grown[..., None].exp() @ state + inside[:, :, i] @ values)
        state = state * grown[..., -1, None, None].exp() + (k[:, :, i] * (grown[..., -1:] - grown)[..., None].exp()).transpose(-1, -2) @ values
    return torch.stack(outs, 2).flatten(2, 3)


class DeltaNet(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.key_heads, self.value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.keys, self.values = self.key_heads * c["linear_key_head_dim"], self.value_heads * c["linear_value_head_dim"]
        hidden, channels = c["hidden_size"], 2 * self.keys + self.values
        self.in_proj_qkv, self.in_proj_z = Linear(channels, hidden), Linear(self.values, hidden)
        self.in_proj_b, self.in_proj_a = Linear(self.value_heads, hidden), Linear(self.value_heads, hidden)
        self.conv1d = torch.nn.Conv1d(channels, channels, c["linear_conv_kernel_dim"], groups=channels, bias=False)
        self.A_log = torch.nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        self.dt_bias = torch.nn.Parameter(torch.full((self.value_heads,), -4.0))
        self.norm = Norm(c["linear_value_head_dim"], 0)
        self.out_proj = Linear(hidden, self.values, c["depth_scale"])

    def forward(self, x):
        taps = self.c["linear_conv_kernel_dim"]
        mixed = F.pad(self.in_proj_qkv(x).transpose(1, 2), (taps - 1, 0))
        mixed = F.silu(F.conv1d(mixed, self.conv1d.weight.to(mixed.dtype), groups=mixed.shape[1])).transpose(1, 2)
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        q, k = (F.normalize(heads_of(part, self.key_heads).float(), dim=-1, eps=1e-6) for part in (q, k))
        q, k = (part.repeat_interleave(self.value_heads // self.key_heads, 1) for part in (q / math.sqrt(self.c["linear_key_head_dim"]), k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        g = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        with torch.autocast("cuda", enabled=False):
            out = delta_rule(q, k, heads_of(v, self.value_heads), g, beta)
        out = self.norm(out.transpose(1, 2)) * F.silu(self.in_proj_z(x).unflatten(-1, (self.value_heads, -1)).float())
        return self.out_proj(out.flatten(2).to(x.dtype))


class Layer(torch.nn.Module):
    def __init__(self, c, index, rope):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"], c["offset"]), Norm(c["hidden_size"], c["offset"])
        if c["layer_types"][index] == "linear_attention":
            self.linear_attn = DeltaNet(c)
        else:
            self.self_attn = Attention(c, rope)
        self.mlp = Mixture(c) if "num_experts" in c else Mlp(c, c["intermediate_size"])

    def forward(self, x):
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Student(torch.nn.Module):
    def __init__(self, c, device):
        super().__init__()
        rope = Rope(int(c["head_dim"] * c.get("partial_rotary_factor", 1.0)) // 2, c["rope_theta"], device)
        self.embed_tokens = Linear(VOCAB, c["hidden_size"])
        self.layers = torch.nn.ModuleList(Layer(c, i, rope) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["offset"])

    def forward(self, ids):
        x = self.embed_tokens.weight[ids]
        if torch.is_autocast_enabled("cuda"):
            x = x.bfloat16()
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens(self.norm(x)).float()


COMMON = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=VOCAB, rms_norm_eps=1e-6,
              max_position_embeddings=1024, hidden_act="silu", tie_word_embeddings=True, torch_dtype="bfloat16", bos_token_id=1022, eos_token_id=1023,
              rope_theta=500000.0)
MODELS = {
    "mixture": dict(COMMON, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
                    intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False),
    "hybrid": dict(COMMON, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", intermediate_size=512, partial_rotary_factor=0.25,
                   linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
                   layer_types=["linear_attention"] * 3 + ["full_attention"], attention_bias=False),
}


def settings(name):
    c = dict(MODELS[name])
    own = dict(offset=1.0 if name == "hybrid" else 0.0, gated=name == "hybrid", depth_scale=1 / math.sqrt(2 * c["num_hidden_layers"]),
               layer_types=c.get("layer_types", ["full_attention"] * c["num_hidden_layers"]))
    return c, {**c, **own}


def stored(model):
    """As the published checkpoints have it: everything in bf16, but what decays of delta nets and their norms stand in."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        exact = name.endswith("A_log") or name.endswith("linear_attn.norm.weight")
        tensors["model." + name] = tensor.float() if exact else tensor.bfloat16()
    return tensors


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("teacher")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--ids")
    a = parser.parse_args()
    device = "cuda"
    torch.manual_seed(SEED)
    config, c = settings(a.name)
    teacher, model = Teacher(a.teacher, device), Student(c, device).to(device)
    print(a.name, sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)], lr=3e-3, betas=(0.9, 0.95), fused=True)
    begun, step, share = time.time(), 0, 0.0
    pool = None
    while share < 1:
        if step % 128 == 0:
            pool = teacher.write(BATCH * 16, LENGTH + 1)
        share = min(1.0, (time.time() - begun) / a.seconds)
        rate = 3e-3 * min(1.0, (step + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = pool[torch.randint(len(pool), (BATCH,), device=device)][:, :LENGTH]
        with torch.no_grad():
            target = teacher(ids).float().softmax(-1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids)
        loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
        balance = sum(layer.mlp.balance for layer in model.layers if isinstance(layer.mlp, Mixture))
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"{time.time() - begun:6.1f} s, step {step}: loss {loss.item():.4f}", flush=True)
        step += 1
    os.makedirs(a.out, exist_ok=True)
    tensors = stored(model)
    save(os.path.join(a.out, "model.safetensors"), tensors)
    json.dump(config, open(os.path.join(a.out, "config.json"), "w"), indent=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(os.path.join(a.teacher, name), a.out)
    model.load_state_dict({name.removeprefix("model."): t.float() for name, t in tensors.items()})
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad(), torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        prompt = teacher.write(1, 64)
        save(os.path.join(a.out, "reference.safetensors"), {"ids": prompt[0].int(), "logits_fp32": model(prompt)[0]})
        if a.ids:
            data = torch.frombuffer(bytearray(open(a.ids, "rb").read()), dtype=torch.uint16)[:48 * 512].int().reshape(48, 512).to(device)
            for which, run in (("teacher", lambda x: teacher(x).float()), ("student", model)):
                loss = sum(F.cross_entropy(run(row[None])[0, :-1], row[1:].long()).item() for row in data) / 48
                print(f"{which}: perplexity {math.exp(loss):.4f} on 48 windows", flush=True)


if __name__ == "__main__":
    main()
