"""The plug-in for vLLM. vLLM itself needs a GPU and 5 GB of packages, so what it brings stands here in short, with the
signatures of vLLM 0.33: that w4q's side fits together and computes what it must. With a vLLM in the environment the last test runs
it."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
import w4q

STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class WeightsMapper:
    def __init__(self, orig_to_new_regex=None, orig_to_new_prefix=None):
        self.regex = orig_to_new_regex or {}
        self.prefix = orig_to_new_prefix or {}

    def __or__(self, other):
        return WeightsMapper({**self.regex, **other.regex}, {**self.prefix, **other.prefix})

    def apply_list(self, names):
        return [mapped for name in names if (mapped := self.mapped(name)) is not None]

    def mapped(self, name):
        for pattern, new in self.regex.items():
            if pattern.search(name):
                if new is None:
                    return None
                name = pattern.sub(new, name)
        for prefix, new in self.prefix.items():
            if name.startswith(prefix):
                name = new + name[len(prefix):]
        return name


def stand_ins(folder: str, ranks: int) -> dict[str, types.ModuleType]:
    class QuantizationConfig:
        def __init__(self):
            self.packed_modules_mapping = {}

        @staticmethod
        def get_cache_scale_mapper():
            return WeightsMapper({re.compile(r"\.k_scale$"): ".attn.k_scale"})

    class Embedding(torch.nn.Module):
        pass

    class Unquantized:
        def process_weights_after_loading(self, layer):
            layer.processed = True

    methods: list[str] = []
    configs: dict[str, type] = {}

    def register_quantization_config(name):
        assert name not in methods
        methods.append(name)
        return lambda config: configs.setdefault(name, config)

    current = types.SimpleNamespace(model_config=types.SimpleNamespace(model=folder),
                                    device_config=types.SimpleNamespace(device=torch.device("cpu")))
    layers = "vllm.model_executor.layers."
    contents = {
        "vllm.config": {"get_current_vllm_config": lambda: current},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: ranks},
        layers + "linear": {"LinearBase": type("LinearBase", (torch.nn.Module,), {}), "LinearMethodBase": object,
                            "UnquantizedLinearMethod": Unquantized},
        layers + "quantization": {"QUANTIZATION_METHODS": methods, "configs": configs,
                                  "register_quantization_config": register_quantization_config},
        layers + "quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        layers + "vocab_parallel_embedding": {"VocabParallelEmbedding": Embedding, "UnquantizedEmbeddingMethod": Unquantized,
                                              "ParallelLMHead": type("ParallelLMHead", (Embedding,), {})},
        "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
    }
    modules: dict[str, types.ModuleType] = {}
    for name, values in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(modules[name]).update(values)
    return modules


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in as a vLLM that loads `folder` over `ranks` GPUs imports it; with its config, and vLLM's modules."""

    def loaded(folder, ranks=1):
        modules = stand_ins(str(folder), ranks)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "w4q.vllm_plugin", raising=False)
        import w4q.vllm_plugin as plugin

        plugin.register()
        plugin.register()  # each process does, and some twice
        quantization = modules["vllm.model_executor.layers.quantization"]
        assert quantization.QUANTIZATION_METHODS == ["w4q"]
        config = quantization.configs["w4q"].from_config({"quant_method": "w4q", "linears": dict.fromkeys(w4q.open(folder).names)})
        config.packed_modules_mapping = STACKED
        return config, modules

    return loaded


def layer_of(modules, kind="LinearBase"):
    where = "linear" if kind == "LinearBase" else "vocab_parallel_embedding"
    return getattr(modules["vllm.model_executor.layers." + where], kind)()


@pytest.mark.parametrize("variant", ["kbit3", "int4-asym", "residual"])
def test_fused_linears_compute_what_their_parts_do(plugin, make, variant):
    folder = make(variant)
    config, modules = plugin(folder)
    packed = w4q.open(folder)
    for prefix, names in {"self_attn.qkv_proj": STACKED["qkv_proj"], "self_attn.o_proj": ["o_proj"],
                          "mlp.gate_up_proj": STACKED["gate_up_proj"], "mlp.down_proj": ["down_proj"]}.items():
        block = prefix.split(".")[0]
        weights = [packed.decode(f"model.layers.0.{block}.{name}").torch() for name in names]
        layer = layer_of(modules)
        method = config.get_quant_method(layer, "model.layers.0." + prefix)
        outputs, inputs = [weight.shape[0] for weight in weights], weights[0].shape[1]
        method.create_weights(layer, inputs, outputs, inputs, sum(outputs), torch.float32, weight_loader=None)
        method.process_weights_after_loading(layer)
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
        bias = torch.arange(sum(outputs), dtype=torch.float32)
        expected = x.double() @ torch.cat(weights).double().T + bias
        assert torch.allclose(method.apply(layer, x, bias).double(), expected, rtol=1e-4, atol=1e-4)
        assert method.apply(layer, x).shape == (3, sum(outputs))


def test_planes_are_left_to_w4q_and_all_else_to_vllm(plugin, make):
    folder = make("tables")
    config, modules = plugin(folder)
    mapper = config.get_cache_scale_mapper()
    names = w4q.open(folder).tensors
    left = mapper.apply_list(names)
    assert "model.norm.weight" in left and not any(".codes" in name or ".scales" in name for name in left)
    assert len(left) < len(names)
    assert mapper.apply_list(["model.layers.0.self_attn.k_scale"]) == ["model.layers.0.self_attn.attn.k_scale"]
    assert config.get_quant_method(torch.nn.Module(), "model.layers.0.self_attn.attn") is None


def test_a_packed_table_is_decoded(plugin, make):
    folder = make("tables")
    config, modules = plugin(folder)
    layer = layer_of(modules, "VocabParallelEmbedding")
    expected = w4q.open(folder).decode("model.embed_tokens", "bfloat16").torch()
    layer.weight = torch.nn.Parameter(torch.zeros(expected.shape[0] + 64, expected.shape[1], dtype=torch.bfloat16))
    method = config.get_quant_method(layer, "model.embed_tokens")
    method.process_weights_after_loading(layer)
    assert layer.processed
    assert torch.equal(layer.weight[: expected.shape[0]], expected) and not layer.weight[expected.shape[0]:].any()


def test_a_packed_head_may_stand_in_a_padded_vocabulary(plugin, make, model, tmp_path):
    folder = tmp_path / "out"  # folding makes the tied head a tensor of its own
    w4q.quantize(model, folder, k=4, lm_head=True, fold_rotations=True, device="cpu")
    config, modules = plugin(folder)
    weight = w4q.open(folder).decode("lm_head").torch()
    layer = layer_of(modules, "ParallelLMHead")
    method = config.get_quant_method(layer, "lm_head")
    method.create_weights(layer, weight.shape[1], [weight.shape[0] + 64], weight.shape[1], weight.shape[0] + 64, torch.float32)
    x = torch.ones(2, weight.shape[1])
    assert torch.allclose(method.apply(layer, x), x @ weight.T, rtol=1e-4, atol=1e-3)
    config, modules = plugin(make("kbit3"))
    assert config.get_quant_method(layer_of(modules, "ParallelLMHead"), "lm_head") is None


def test_names_follow_a_wrapped_model(plugin, make):
    config, modules = plugin(make("kbit3"))
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    names = config.packed_names("language_model.model.layers.1.self_attn.qkv_proj")
    assert names == [f"model.layers.1.self_attn.{part}" for part in STACKED["qkv_proj"]]


def test_what_does_not_work_is_refused(plugin, make, tmp_path):
    folder = make("kbit3")
    config, modules = plugin(folder, ranks=2)
    method = config.get_quant_method(layer_of(modules), "model.layers.0.mlp.down_proj")
    with pytest.raises(w4q.Error, match="tensor-parallel-size 1"):
        method.create_weights(layer_of(modules), 1, [1], 1, 1, torch.float16)
    config, modules = plugin(folder)
    method = config.get_quant_method(layer_of(modules), "model.layers.0.mlp.down_proj")
    with pytest.raises(w4q.Error, match="not of the shape"):
        method.create_weights(layer_of(modules), 1, [1], 1, 1, torch.float16)
    del config.names["model.layers.0.self_attn.k_proj"]
    with pytest.raises(w4q.Error, match="fuses packed linears with others"):
        config.get_quant_method(layer_of(modules), "model.layers.0.self_attn.qkv_proj")
    config.names = {"model.layers.0.mlp.experts.0.down_proj": "x"}
    with pytest.raises(w4q.Error, match="experts"):
        config.get_quant_method(type("FusedMoE", (torch.nn.Module,), {})(), "model.layers.0.mlp.experts")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM runs w4q's folders on a GPU")
def test_vllm_generates(make):
    vllm = pytest.importorskip("vllm")
    llm = vllm.LLM(str(make("kbit4", "sm90")), dtype="float16", enforce_eager=True, max_model_len=128)
    text = llm.generate(["Once upon a time"], vllm.SamplingParams(max_tokens=16, temperature=0))[0].outputs[0].token_ids
    said = w4q.command("generate", str(make("kbit4")), prompt="Once upon a time", max_tokens=16, device="cpu")
    assert list(text)[:4] == said["ids"][:4]
