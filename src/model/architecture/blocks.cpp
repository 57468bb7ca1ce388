#include "model/architecture/blocks.h"

#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {

LayerNames::LayerNames(int64_t layer)
    : prefix(concat("model.layers.", layer, ".")), gguf_prefix(concat("blk.", layer, ".")) {}

PlannedNorm LayerNames::norm(const ModelConfig& config, NormRole role, std::string_view name,
                             std::string_view gguf) const {
  const bool of_heads = role == NormRole::query || role == NormRole::key;
  return {.role = role,
          .name = concat(prefix, name),
          .gguf = concat(gguf_prefix, gguf),
          .size = of_heads ? config.head_dim : config.hidden_size,
          .offset = config.architecture->norm_offset};
}

PlannedLinear LayerNames::linear(Role role, std::string_view name, std::string_view gguf, int64_t n, int64_t k,
                                 bool bias) const {
  return {.role = role, .name = concat(prefix, name), .gguf = concat(gguf_prefix, gguf), .n = n, .k = k, .bias = bias};
}

Block attention_block(const ModelConfig& config, int64_t layer) {
  const LayerNames names(layer);
  const int64_t hidden = config.hidden_size, queries = config.heads * config.head_dim;
  const int64_t keys = config.kv_heads * config.head_dim;
  const bool bias = config.qkv_bias;
  auto query = names.linear(Role::query, "self_attn.q_proj", "attn_q", queries, hidden, bias);
  auto key = names.linear(Role::key, "self_attn.k_proj", "attn_k", keys, hidden, bias);
  auto value = names.linear(Role::value, "self_attn.v_proj", "attn_v", keys, hidden, bias);
  auto output = names.linear(Role::output, "self_attn.o_proj", "attn_output", hidden, queries, config.output_bias);
  query.rotary_rows = key.rotary_rows = true;
  value.outputs = Basis::heads;
  output.outputs = Basis::stream;
  Block block{.kind = BlockKind::attention};
  block.norms.push_back(names.norm(config, NormRole::input, "input_layernorm", "attn_norm"));
  if (config.qk_norm) {
    block.norms.push_back(names.norm(config, NormRole::query, "self_attn.q_norm", "attn_q_norm"));
    block.norms.push_back(names.norm(config, NormRole::key, "self_attn.k_norm", "attn_k_norm"));
  }
  block.groups.push_back(
      {.linears = {query, key, value}, .width = hidden, .inputs = Basis::stream, .norm = block.norms[0]});
  block.groups.push_back({.linears = {output},
                          .width = queries,
                          .inputs = Basis::heads,
                          .producer = value.name,
                          .head_dim = config.head_dim,
                          .heads_per_producer = config.groups()});
  block.window = config.sliding_window[static_cast<size_t>(layer)];
  block.rope = config.rope;
  return block;
}

Block gated_mlp_block(const ModelConfig& config, int64_t layer) {
  const LayerNames names(layer);
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const bool bias = config.mlp_bias;
  auto gate = names.linear(Role::gate, "mlp.gate_proj", "ffn_gate", inner, hidden, bias);
  auto up = names.linear(Role::up, "mlp.up_proj", "ffn_up", inner, hidden, bias);
  auto down = names.linear(Role::down, "mlp.down_proj", "ffn_down", hidden, inner, bias);
  down.outputs = Basis::stream;
  Block block{.kind = BlockKind::gated_mlp};
  block.norms.push_back(names.norm(config, NormRole::input, "post_attention_layernorm", "ffn_norm"));
  block.groups.push_back({.linears = {gate, up}, .width = hidden, .inputs = Basis::stream, .norm = block.norms[0]});
  block.groups.push_back({.linears = {down}, .width = inner, .inputs = Basis::own, .producer = up.name});
  block.activation = config.architecture->activation;
  return block;
}

std::vector<Block> llama_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), gated_mlp_block(config, layer)};
}

}  // namespace w4q::model
