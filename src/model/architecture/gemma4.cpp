#include <algorithm>
#include <string>

#include "core/text.h"
#include "model/architecture/readers.h"
#include "model/architecture/rows.h"
#include "model/config_rope.h"

namespace w4q::model {

namespace {

/// Keys and values of the last layers are those of the last one of their type before them.
void share_keys(const ConfigReader& reader, const std::vector<std::string>& types, int64_t shared,
                ModelConfig& config) {
  constexpr std::string_view key = "num_kv_shared_layers";
  const auto own = types.begin() + static_cast<std::ptrdiff_t>(config.layers - shared);
  for (auto layer = own; layer != types.end(); ++layer) {
    const auto from = std::find(std::make_reverse_iterator(own), types.rend(), *layer);
    if (from == types.rend()) reader.refuse(key, concat("no layer before the shared ones is of type ", *layer));
    AttentionConfig& attention = config.attention[static_cast<size_t>(layer - types.begin())];
    attention.keys_of = types.rend() - from - 1;
    attention.keys_are_values = false;
    const AttentionConfig& source = config.attention[static_cast<size_t>(*attention.keys_of)];
    const bool same = source.head_dim == attention.head_dim && source.kv_heads == attention.kv_heads;
    if (!same) reader.refuse(key, concat("layer ", layer - types.begin(), " has other heads than it reads keys of"));
  }
}

/// What one layer has otherwise, in the spelling that names layers by their numbers.
void read_layer(const ConfigReader& layers, int64_t layer, AttentionConfig& attention) {
  const std::string number = std::to_string(layer);
  const io::Json* own = layers.find(number);
  if (own == nullptr) return;
  const ConfigReader reader(*own, layers.source(), concat("per_layer_config.", number, "."));
  attention.head_dim = reader.size("head_dim", attention.head_dim);
  attention.kv_heads = reader.size("num_key_value_heads", attention.kv_heads);
  if (attention.head_dim % 2 != 0) reader.refuse("head_dim", "expected an even number of channels");
  if (attention.heads % attention.kv_heads != 0) reader.refuse("num_key_value_heads", "heads do not share them evenly");
}

/// Layers without a window have heads of another size, of which a part turns.
void read_gemma4_attention(const ConfigReader& reader, const std::vector<std::string>& types, ModelConfig& config) {
  const io::Json* layers = reader.find("per_layer_config");
  const int64_t wide = layers != nullptr ? config.head_dim : reader.size("global_head_dim", 512);
  const bool keys_are_values = reader.boolean("attention_k_eq_v").value_or(false);
  const int64_t wide_heads = keys_are_values && layers == nullptr
                                 ? reader.size("num_global_key_value_heads", config.kv_heads)
                                 : config.kv_heads;
  if (wide % 2 != 0) reader.refuse("global_head_dim", "expected an even number of channels");
  if (config.heads % wide_heads != 0) reader.refuse("num_global_key_value_heads", "heads do not share them evenly");
  const RopeConfig local = parse_rope(reader, {sliding_attention, config.head_dim, 10000}, config);
  config.rope = parse_rope(reader, {full_attention, wide, 1e6}, config);
  spread_attention(config);
  for (size_t layer = 0; layer < types.size(); ++layer) {
    AttentionConfig& attention = config.attention[layer];
    attention.scale = 1;
    attention.value_norm = true;
    if (types[layer] == sliding_attention) {
      attention.rope = local;
    } else {
      attention.head_dim = wide;
      attention.kv_heads = wide_heads;
      attention.keys_are_values = keys_are_values;
    }
    if (layers == nullptr) continue;
    read_layer(ConfigReader(*layers, reader.source(), "per_layer_config."), static_cast<int64_t>(layer), attention);
  }
  set_windows(reader, types, 512, config);
  const int64_t shared = reader.integer("num_kv_shared_layers").value_or(0);
  if (shared < 0 || shared >= config.layers)
    reader.refuse("num_kv_shared_layers", "expected fewer than there are layers");
  share_keys(reader, types, shared, config);
}

void read_gemma4(const ConfigReader& reader, ModelConfig& config) {
  refuse_later_tokens(reader);
  auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [](int64_t layer) {
    return (layer + 1) % 6 == 0 ? full_attention : sliding_attention;
  });
  types.back() = full_attention;  // whatever is stated
  read_gemma4_attention(reader, types, config);
  config.logit_cap = reader.number("final_logit_softcapping").value_or(0);
  constexpr int64_t most = 1 << 16;
  config.layer_embedding_size = reader.integer("hidden_size_per_layer_input").value_or(256);
  if (config.layer_embedding_size < 0 || config.layer_embedding_size > most) {
    reader.refuse("hidden_size_per_layer_input", concat("expected a size from 0 to ", most));
  }
  config.layer_vocab_size = reader.size("vocab_size_per_layer_input", 262144);
  const bool wide = reader.boolean("use_double_wide_mlp").value_or(false);
  for (const auto& attention : config.attention) {
    config.intermediate_sizes.push_back(config.intermediate_size * (wide && attention.keys_of ? 2 : 1));
  }
  if (!reader.boolean("enable_moe_block").value_or(false)) return;
  read_mixture(reader, {.chosen = "top_k_experts"}, config);
  config.mixture.storage = ExpertStorage::stacked_halves;
  config.mixture.stacks_alone = true;
  config.mixture.shared_intermediate = config.intermediate_size;
}

/// A dense MLP and experts beside each other, each with norms of its own; the router has one without a weight.
Block gemma4_mixture(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.router = "router.proj",
                               .experts = "experts",
                               .stacked_inputs = "experts.gate_up_proj",
                               .stacked_outputs = "experts.down_proj",
                               .shared = "mlp",
                               .gguf_shared = {}};
  const LayerNames in(config, layer);
  ModelConfig own = config;
  own.mixture.shared_intermediate = config.intermediate_of(layer);
  Block block = with_input_norm(mixture_block(own, layer, names), config, layer, "pre_feedforward_layernorm");
  block.norms.push_back(in.norm(config, NormRole::expert_input, "pre_feedforward_layernorm_2", "pre_ffw_norm_2"));
  block.norms.push_back(in.norm(config, NormRole::expert_output, "post_feedforward_layernorm_2", "post_ffw_norm_2"));
  block.norms.push_back(in.norm(config, NormRole::dense_output, "post_feedforward_layernorm_1", "post_ffw_norm_1"));
  for (auto& group : block.groups) {
    if (group.expert && group.norm) group.norm = *block.norm(NormRole::expert_input);
  }
  block.groups.front().norm.reset();
  block.vectors.push_back(
      in.vector(VectorRole::router_scale, "router.scale", {config.hidden_size}, "ffn_gate_inp.scale"));
  block.vectors.push_back(
      in.vector(VectorRole::expert_scale, "router.per_expert_scale", {config.mixture.experts}, "ffn_down_exps.scale"));
  return block;
}

/// What each layer adds of its own embedding of the token.
Block layer_embedding_block(const ModelConfig& config, int64_t layer) {
  const LayerNames names(config, layer);
  const int64_t hidden = config.hidden_size, size = config.layer_embedding_size;
  Block block{.kind = BlockKind::layer_embedding, .gating = {.activation = config.activation}};
  auto gate = names.linear(Role::layer_gate, "per_layer_input_gate", "inp_gate", size, hidden, false);
  auto output = names.linear(Role::layer_output, "per_layer_projection", "proj", hidden, size, false);
  output.outputs = Basis::stream;
  block.groups = {{.linears = {gate}, .width = hidden, .inputs = Basis::stream}, {.linears = {output}, .width = size}};
  return with_output_norm(std::move(block), config, layer, "post_per_layer_input_norm");
}

std::vector<Block> gemma4_blocks(const ModelConfig& config, int64_t layer) {
  auto mlp = config.has_mixture(layer)
                 ? gemma4_mixture(config, layer)
                 : with_input_norm(gated_mlp_block(config, layer), config, layer, "pre_feedforward_layernorm");
  std::vector<Block> blocks = {
      with_output_norm(attention_block(config, layer), config, layer, "post_attention_layernorm"),
      with_output_norm(std::move(mlp), config, layer, "post_feedforward_layernorm")};
  if (config.layer_embedding_size > 0) blocks.push_back(layer_embedding_block(config, layer));
  blocks.back().vectors.push_back(
      LayerNames(config, layer).vector(VectorRole::layer_scale, "layer_scalar", {1}, "layer_output_scale.weight"));
  return blocks;
}

}  // namespace

constinit const ArchitectureRow gemma4_architecture = {
    .model_type = "gemma4_text",
    .class_name = "Gemma4ForCausalLM",
    .wrappers = {"Gemma4ForConditionalGeneration"},
    .sizes = {262144, 2304, 9216, 30, 8},
    .kv_heads = 4,
    .head_dim = 256,
    .max_positions = 131072,
    .rope_parameters = R"({"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
    "rope_theta": 1000000}, "sliding_attention": {"rope_type": "default", "rope_theta": 10000}})",
    .attention_bias = BiasRule::stated,
    .qk_norm = true,
    .activation_key = "hidden_activation",
    .activation = "gelu_pytorch_tanh",
    .scales_embedding = true,
    .ties_head = true,
    .reads_rope = true,
    .gguf = "gemma4",
    .read = read_gemma4,
    .blocks = gemma4_blocks};

}  // namespace w4q::model
