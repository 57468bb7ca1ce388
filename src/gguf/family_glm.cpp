// GLM; mixtures behind sigmoid routers with a correction, glm4moe and dots1, and text models of those that see, which share
// the names of glm4 and glm4moe with those that do not.
#include <algorithm>

#include "core/text.h"
#include "gguf/family_rows.h"

namespace w4q::gguf {

using model::ModelConfig;

namespace {

void read_glm_mixture(const GgufKeys& keys, io::Json& config) {
  demand_sigmoid(keys);
  if (keys.integer("%.nextn_predict_layers").value_or(0) != 0) {
    throw keys.error(ErrorCode::unsupported, "%.nextn_predict_layers", "layers that predict further tokens");
  }
  config["n_routed_experts"] = keys.size("%.expert_count");
  config["num_experts_per_tok"] = keys.size("%.expert_used_count");
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
  config["first_k_dense_replace"] = keys.integer("%.leading_dense_block_count").value_or(0);
  config["n_shared_experts"] = keys.size("%.expert_shared_count");
  config["routed_scaling_factor"] = keys.number("%.expert_weights_scale").value_or(1);
  config["norm_topk_prob"] = keys.boolean("%.expert_weights_norm").value_or(false);
}

}  // namespace

void demand_sigmoid(const GgufKeys& keys) {
  constexpr std::string_view key = "%.expert_gating_func";
  if (const auto stated = keys.integer(key); stated && *stated != sigmoid_gating) {
    throw keys.error(ErrorCode::unsupported, key, concat("is ", *stated));
  }
}

void write_glm4_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto& mixture = config.mixture;
  const auto first = std::ranges::find(config.mixture_layers, true);
  const int64_t dense = first - config.mixture_layers.begin();
  write_mixture(config, prefix, mixture.renormalizes, dense, metadata);
  write_expert_size(config, prefix, metadata);
  metadata.push_back({prefix + "leading_dense_block_count", u32(dense)});
  metadata.push_back({prefix + "expert_shared_count", u32(mixture.shared_intermediate / mixture.intermediate)});
  metadata.push_back({prefix + "expert_weights_scale", static_cast<float>(mixture.scale)});
  metadata.push_back({prefix + "expert_weights_norm", mixture.renormalizes});
  metadata.push_back({prefix + "expert_gating_func", sigmoid_gating});
}

void read_glm4_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  read_glm_mixture(keys, config);
  read_qkv_biases(file, keys, config);
  config["use_qk_norm"] = has(file, "blk.0.attn_q_norm.weight");
}

void write_glm(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  demand(config.head_dim * config.heads == config.hidden_size, config, "head_dim");
}

void write_glm4v(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_picture_pairs(config, prefix, {}, metadata);
}

void read_glm4v(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_picture_pairs(keys, false, config);
}

void write_glm4v_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_glm4_moe(config, prefix, metadata);
  write_picture_pairs(config, prefix, {}, metadata);
}

void read_glm4v_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  read_glm_mixture(keys, config);
  read_qkv_biases(file, keys, config);
  read_picture_pairs(keys, false, config);
}

void write_dots1(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand_own_head(config);
  demand(!config.qkv_bias, config, "attention_bias");
  demand(config.kv_heads == config.heads, config, "fewer key than query heads");
  write_glm4_moe(config, prefix, metadata);
}

void read_dots1(const io::GgufFile&, const GgufKeys& keys, io::Json& config) { read_glm_mixture(keys, config); }

}  // namespace w4q::gguf
