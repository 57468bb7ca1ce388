#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Every other layer has a window; a logit of each head that no key has; experts with biases and clamped gates.
void read_gpt_oss(const ConfigReader& reader, ModelConfig& config) {
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [](int64_t layer) {
    return layer % 2 == 0 ? sliding_attention : full_attention;
  });
  spread_attention(config);
  set_windows(reader, types, 128, config);
  for (auto& layer : config.attention) layer.sinks = true;
  read_mixture(reader, {.experts = "num_local_experts", .intermediate = "intermediate_size"}, config);
  config.mixture.storage = ExpertStorage::stacked_in_turn;
  config.mixture.stacks_alone = true;
  config.activation = Activation::clamped_swiglu;
  config.activation_limit = reader.positive("swiglu_limit", 7.0);
  config.activation_slope = reader.number("swiglu_alpha").value_or(config.activation_slope);
}

std::vector<Block> gpt_oss_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.router = "mlp.router", .bias = true};
  return {attention_block(config, layer), mixture_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow gpt_oss_architecture = {
    .model_type = "gpt_oss",
    .class_name = "GptOssForCausalLM",
    .sizes = {201088, 2880, 2880, 36, 64},
    .mixture = {128, 4, 2880},
    .kv_heads = 8,
    .head_dim = 64,
    .max_positions = 131072,
    .rope_theta = 150000,
    .rope_parameters = R"({"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "truncate": false,
    "original_max_position_embeddings": 4096})",
    .rms_norm_eps = 1e-5,
    .biases_attention = true,
    .attention_bias = BiasRule::stated,
    .activation_key = {},
    .gguf = "gpt-oss",
    .gguf_stated_biases = true,
    .gguf_mlp_norm = "post_attention_norm",
    .read = read_gpt_oss,
    .blocks = gpt_oss_blocks};

}  // namespace w4q::model
