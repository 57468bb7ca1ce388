#include "model/architecture/blocks.h"

#include <algorithm>

#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {

LayerNames::LayerNames(const ModelConfig& config, int64_t layer)
    : prefix(concat(config.names.prefix, "layers.", layer, ".")), gguf_prefix(concat("blk.", layer, ".")) {}

PlannedNorm LayerNames::norm(const ModelConfig& config, NormRole role, std::string_view name,
                             std::string_view gguf) const {
  return {.role = role,
          .name = concat(prefix, name),
          .gguf = concat(gguf_prefix, gguf),
          .size = config.hidden_size,
          .offset = config.architecture->norm_offset};
}

PlannedLinear LayerNames::linear(Role role, std::string_view name, std::string_view gguf, int64_t n, int64_t k,
                                 bool bias) const {
  return {.role = role, .name = concat(prefix, name), .gguf = concat(gguf_prefix, gguf), .n = n, .k = k, .bias = bias};
}

PlannedVector LayerNames::vector(VectorRole role, std::string_view name, Shape shape, std::string_view gguf) const {
  return {.role = role,
          .name = concat(prefix, name),
          .gguf = gguf.empty() ? std::string() : concat(gguf_prefix, gguf),
          .shape = std::move(shape)};
}

namespace {

PlannedNorm head_norm(const LayerNames& names, const ModelConfig& config, NormRole role, std::string_view name,
                      std::string_view gguf, int64_t heads, int64_t head_dim) {
  auto norm = names.norm(config, role, name, gguf);
  norm.size = config.architecture->whole_qk_norm ? heads * head_dim : head_dim;
  return norm;
}

/// What of attention does not depend on how its linears stand.
Block begun_attention(const ModelConfig& config, int64_t layer) {
  const LayerNames names(config, layer);
  Block block{.kind = BlockKind::attention, .attention = config.attention_of(layer)};
  const AttentionConfig& attention = block.attention;
  block.norms.push_back(names.norm(config, NormRole::input, "input_layernorm", "attn_norm"));
  if (config.qk_norm) {
    block.norms.push_back(head_norm(names, config, NormRole::query, "self_attn.q_norm", "attn_q_norm", attention.heads,
                                    attention.head_dim));
  }
  if (config.qk_norm && !attention.keys_of) {
    block.norms.push_back(head_norm(names, config, NormRole::key, "self_attn.k_norm", "attn_k_norm", attention.kv_heads,
                                    attention.head_dim));
  }
  if (attention.sinks) {
    block.vectors.push_back(names.vector(VectorRole::sinks, "self_attn.sinks", {attention.heads}, "attn_sinks.weight"));
  }
  block.output_scale = config.residual_scale;
  return block;
}

PlannedLinear attention_output(const ModelConfig& config, int64_t layer, const AttentionConfig& attention) {
  auto output = LayerNames(config, layer)
                    .linear(Role::output, "self_attn.o_proj", "attn_output", config.hidden_size,
                            attention.heads * attention.head_dim, config.output_bias);
  output.outputs = Basis::stream;
  return output;
}

/// What config.json says of all gated MLPs.
kernels::Gating gating_of(const ModelConfig& config) {
  return {.activation = config.activation, .limit = config.activation_limit, .slope = config.activation_slope};
}

}  // namespace

Block attention_block(const ModelConfig& config, int64_t layer) {
  const LayerNames names(config, layer);
  Block block = begun_attention(config, layer);
  const AttentionConfig& attention = block.attention;
  const int64_t hidden = config.hidden_size, queries = attention.heads * attention.head_dim;
  const int64_t keys = attention.kv_heads * attention.head_dim;
  const bool bias = config.qkv_bias;
  auto query = names.linear(Role::query, "self_attn.q_proj", "attn_q", attention.output_gate ? 2 * queries : queries,
                            hidden, bias);
  auto key = names.linear(Role::key, "self_attn.k_proj", "attn_k", keys, hidden, bias);
  auto value = names.linear(Role::value, "self_attn.v_proj", "attn_v", keys, hidden, bias);
  query.rotary_rows = key.rotary_rows = true;
  // Values that are turned come out turned, unless something lies between that minds.
  const bool own_values = !attention.keys_of && !attention.keys_are_values;
  const bool plain = own_values && !attention.output_gate && !attention.value_norm;
  if (plain) value.outputs = Basis::heads;
  InputGroup inputs{.linears = {query}, .width = hidden, .inputs = Basis::stream, .norm = block.norms[0]};
  if (!attention.keys_of) inputs.linears.push_back(key);
  if (own_values) inputs.linears.push_back(value);
  block.groups.push_back(std::move(inputs));
  InputGroup outputs{.linears = {attention_output(config, layer, attention)}, .width = queries};
  if (plain) outputs.inputs = Basis::heads;
  if (own_values && !attention.value_norm) {
    outputs.producer = value.name;
    outputs.head_dim = attention.head_dim;
    outputs.heads_per_producer = attention.groups();
  }
  block.groups.push_back(std::move(outputs));
  return block;
}

Block fused_attention_block(const ModelConfig& config, int64_t layer) {
  Block block = begun_attention(config, layer);
  const AttentionConfig& attention = block.attention;
  const int64_t hidden = config.hidden_size, queries = attention.heads * attention.head_dim;
  const int64_t width = queries + 2 * attention.kv_heads * attention.head_dim;
  auto fused = LayerNames(config, layer)
                   .linear(Role::query_key_value, "self_attn.qkv_proj", "attn_qkv", width, hidden, config.qkv_bias);
  block.groups.push_back({.linears = {fused}, .width = hidden, .inputs = Basis::stream, .norm = block.norms[0]});
  block.groups.push_back({.linears = {attention_output(config, layer, attention)}, .width = queries});
  return block;
}

namespace {

/// gate and up, and down, of any gated MLP.
std::vector<InputGroup> gated_groups(const ModelConfig& config, const LayerNames& names, const std::string& module,
                                     const std::array<std::string_view, 3>& parts, int64_t inner,
                                     std::string_view gguf_end = {}) {
  const int64_t hidden = config.hidden_size;
  const bool bias = config.mlp_bias;
  const auto linear = [&](Role role, size_t part, std::string_view gguf, int64_t n, int64_t k) {
    return names.linear(role, concat(module, parts[part]), concat(gguf, gguf_end), n, k, bias);
  };
  auto gate = linear(Role::gate, 0, "ffn_gate", inner, hidden), up = linear(Role::up, 1, "ffn_up", inner, hidden);
  auto down = linear(Role::down, 2, "ffn_down", hidden, inner);
  down.outputs = Basis::stream;
  const bool scales_pass = config.activation != Activation::clamped_swiglu;
  return {{.linears = {gate, up}, .width = hidden, .inputs = Basis::stream},
          {.linears = {down}, .width = inner, .inputs = Basis::own, .producer = scales_pass ? up.name : std::string()}};
}

constexpr std::array<std::string_view, 3> usual_parts = {"gate_proj", "up_proj", "down_proj"};

}  // namespace

Block gated_mlp_block(const ModelConfig& config, int64_t layer) {
  const LayerNames names(config, layer);
  Block block{.kind = BlockKind::gated_mlp, .gating = gating_of(config), .output_scale = config.residual_scale};
  block.norms.push_back(
      names.norm(config, NormRole::input, "post_attention_layernorm", config.architecture->gguf_mlp_norm));
  block.groups = gated_groups(config, names, "mlp.", usual_parts, config.intermediate_of(layer));
  block.groups[0].norm = block.norms[0];
  return block;
}

Block fused_mlp_block(const ModelConfig& config, int64_t layer) {
  Block block = gated_mlp_block(config, layer);
  const int64_t inner = block.groups[1].width;
  block.groups[0].linears = {
      LayerNames(config, layer)
          .linear(Role::gate_up, "mlp.gate_up_proj", "ffn_up", 2 * inner, config.hidden_size, config.mlp_bias)};
  block.groups[1].producer.clear();
  block.storage = ExpertStorage::stacked_halves;
  return block;
}

namespace {

/// Inputs and outputs of one expert.
std::vector<InputGroup> expert_groups(const ModelConfig& config, const LayerNames& names, const MixtureNames& called,
                                      int64_t expert) {
  const MixtureConfig& mixture = config.mixture;
  const int64_t hidden = config.hidden_size, inner = mixture.intermediate;
  std::vector<InputGroup> groups;
  if (mixture.storage == ExpertStorage::by_name) {
    groups = gated_groups(config, names, concat(called.experts, ".", expert, "."),
                          {called.gate, called.up, called.down}, inner, "_exps");
    for (auto& group : groups) {
      for (auto& linear : group.linears) {
        linear.bias = called.bias;  // mlp_bias is not of experts
        linear.gguf_part = expert;
      }
    }
  } else {
    auto inputs = names.linear(Role::gate_up, concat(called.stacked_inputs, ".", expert), "ffn_gate_up_exps", 2 * inner,
                               hidden, called.bias);
    auto outputs = names.linear(Role::down, concat(called.stacked_outputs, ".", expert), "ffn_down_exps", hidden, inner,
                                called.bias);
    for (auto* linear : {&inputs, &outputs}) {
      linear->gguf_part = expert;
      if (called.bias) linear->bias_tensor = linear->name.substr(0, linear->name.rfind('.')) + "_bias";
      linear->bias_row = expert;
    }
    outputs.outputs = Basis::stream;
    groups = {{.linears = {inputs}, .width = hidden, .inputs = Basis::stream}, {.linears = {outputs}, .width = inner}};
  }
  for (auto& group : groups) group.expert = expert;
  return groups;
}

}  // namespace

Block mixture_block(const ModelConfig& config, int64_t layer, const MixtureNames& called) {
  const LayerNames names(config, layer);
  const MixtureConfig& mixture = config.mixture;
  Block block{.kind = BlockKind::mixture,
              .gating = gating_of(config),
              .storage = mixture.storage,
              .mixture = mixture,
              .output_scale = config.residual_scale};
  block.norms.push_back(
      names.norm(config, NormRole::input, "post_attention_layernorm", config.architecture->gguf_mlp_norm));
  InputGroup routing{.width = config.hidden_size, .inputs = Basis::stream};
  routing.linears.push_back(
      names.linear(Role::router, called.router, "ffn_gate_inp", mixture.experts, config.hidden_size, called.bias));
  if (!called.shared_gate.empty()) {
    routing.linears.push_back(
        names.linear(Role::shared_gate, called.shared_gate, "ffn_gate_inp_shexp", 1, config.hidden_size, false));
  }
  block.groups.push_back(std::move(routing));
  for (int64_t expert = 0; expert < mixture.experts; ++expert) {
    for (auto& group : expert_groups(config, names, called, expert)) block.groups.push_back(std::move(group));
  }
  if (!called.shared.empty()) {
    for (auto& group : gated_groups(config, names, concat(called.shared, "."), usual_parts, mixture.shared_intermediate,
                                    called.gguf_shared)) {
      block.groups.push_back(std::move(group));
    }
  }
  if (!called.correction.empty()) {
    const Shape shape = called.wide_correction ? Shape{1, mixture.experts} : Shape{mixture.experts};
    block.vectors.push_back(names.vector(VectorRole::correction, called.correction, shape, "exp_probs_b.bias"));
  }
  for (auto& group : block.groups) {
    if (group.inputs == Basis::stream) group.norm = block.norms[0];
  }
  return block;
}

Block mixture_or_mlp_block(const ModelConfig& config, int64_t layer, const MixtureNames& names) {
  return config.has_mixture(layer) ? mixture_block(config, layer, names) : gated_mlp_block(config, layer);
}

Block delta_net_block(const ModelConfig& config, int64_t layer, DeltaProjections projections) {
  const LayerNames names(config, layer);
  const kernels::DeltaShape& shape = config.delta;
  const int64_t hidden = config.hidden_size, heads = shape.value_heads;
  Block block{.kind = BlockKind::delta_net,
              .delta = shape,
              .gating = {.activation = config.activation},  // of the convolution
              .output_scale = config.residual_scale};
  block.norms.push_back(names.norm(config, NormRole::input, "input_layernorm", "attn_norm"));
  block.norms.push_back(names.norm(config, NormRole::delta, "linear_attn.norm", "ssm_norm"));
  block.norms.back().size = shape.value_dim;
  block.norms.back().offset = 0;
  InputGroup inputs{.width = hidden, .inputs = Basis::stream, .norm = block.norms[0]};
  const auto add = [&](Role role, std::string_view name, std::string_view gguf, int64_t n) {
    inputs.linears.push_back(names.linear(role, concat("linear_attn.", name), gguf, n, hidden, false));
  };
  if (projections == DeltaProjections::four) {
    add(Role::delta_mixed, "in_proj_qkv", "attn_qkv", shape.channels());
    add(Role::delta_gate, "in_proj_z", "attn_gate", shape.values());
    add(Role::delta_beta, "in_proj_b", "ssm_beta", heads);
    add(Role::delta_decay, "in_proj_a", "ssm_alpha", heads);
  } else {
    add(Role::delta_mixed_gate, "in_proj_qkvz", "ssm_in", shape.channels() + shape.values());
    add(Role::delta_beta_decay, "in_proj_ba", "ssm_ba", 2 * heads);
  }
  block.groups.push_back(std::move(inputs));
  auto output = names.linear(Role::output, "linear_attn.out_proj", "ssm_out", hidden, shape.values(), false);
  output.outputs = Basis::stream;
  block.groups.push_back({.linears = {output}, .width = shape.values()});
  block.vectors = {names.vector(VectorRole::convolution, "linear_attn.conv1d.weight", {shape.channels(), 1, shape.taps},
                                "ssm_conv1d.weight"),
                   names.vector(VectorRole::decay, "linear_attn.A_log", {heads}, "ssm_a"),
                   names.vector(VectorRole::step_bias, "linear_attn.dt_bias", {heads}, "ssm_dt.bias")};
  return block;
}

std::vector<Block> llama_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), gated_mlp_block(config, layer)};
}

Block with_output_norm(Block block, const ModelConfig& config, int64_t layer, std::string_view name) {
  const std::string_view gguf = block.kind == BlockKind::attention         ? "post_attention_norm"
                                : block.kind == BlockKind::layer_embedding ? "post_norm"
                                                                           : "post_ffw_norm";
  block.norms.push_back(LayerNames(config, layer).norm(config, NormRole::output, name, gguf));
  return block;
}

Block with_input_norm(Block block, const ModelConfig& config, int64_t layer, std::string_view name) {
  std::erase_if(block.norms, [](const PlannedNorm& norm) { return norm.role == NormRole::input; });
  std::optional<PlannedNorm> norm;
  if (!name.empty()) {
    const std::string_view gguf = block.kind == BlockKind::attention ? "attn_norm" : config.architecture->gguf_mlp_norm;
    norm = LayerNames(config, layer).norm(config, NormRole::input, name, gguf);
    block.norms.insert(block.norms.begin(), *norm);
  }
  for (auto& group : block.groups) {
    if (group.inputs == Basis::stream) group.norm = norm;
  }
  return block;
}

}  // namespace w4q::model
