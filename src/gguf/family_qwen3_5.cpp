// Hybrids of gated delta nets and attention: qwen3next, qwen35, qwen35moe.
#include <algorithm>

#include "core/text.h"
#include "gguf/family_rows.h"

namespace w4q::gguf {
namespace {

using model::ModelConfig;

void write_delta_net(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const kernels::DeltaShape& delta = config.delta;
  demand(delta.key_dim == delta.value_dim, config,
         concat("linear_value_head_dim ", delta.value_dim, ", where linear_key_head_dim is ", delta.key_dim));
  const auto first = std::ranges::find(config.delta_layers, false);
  const int64_t interval = first - config.delta_layers.begin() + 1;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const bool remembers = config.has_delta_net(layer);
    demand(remembers == ((layer + 1) % interval != 0), config, concat("layer_types of layer ", layer));
    demand(remembers || config.attention_of(layer).output_gate, config, "attn_output_gate");
  }
  demand(interval > 1, config, "layer_types without a delta net");
  metadata.push_back({prefix + "full_attention_interval", u32(interval)});
  metadata.push_back({prefix + "ssm.conv_kernel", u32(delta.taps)});
  metadata.push_back({prefix + "ssm.state_size", u32(delta.key_dim)});
  metadata.push_back({prefix + "ssm.group_count", u32(delta.key_heads)});
  metadata.push_back({prefix + "ssm.time_step_rank", u32(delta.value_heads)});
  metadata.push_back({prefix + "ssm.inner_size", u32(delta.values())});
}

void write_shared(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
  metadata.push_back({prefix + "expert_shared_feed_forward_length", u32(config.mixture.shared_intermediate)});
}

void read_delta_net(const GgufKeys& keys, io::Json& config) {
  const int64_t heads = keys.size("%.ssm.time_step_rank"), inner = keys.size("%.ssm.inner_size");
  if (inner % heads != 0) {
    throw keys.error(ErrorCode::bad_file, "%.ssm.inner_size", concat("is ", inner)).detail(concat(heads, " heads"));
  }
  config["linear_conv_kernel_dim"] = keys.size("%.ssm.conv_kernel");
  config["linear_key_head_dim"] = keys.size("%.ssm.state_size");
  config["linear_num_key_heads"] = keys.size("%.ssm.group_count");
  config["linear_num_value_heads"] = heads;
  config["linear_value_head_dim"] = inner / heads;
  const int64_t interval = keys.size("%.full_attention_interval", 4);
  config["full_attention_interval"] = interval;
  config["layer_types"] = layer_types(keys, config, interval, "linear_attention", "full_attention");
  config["attn_output_gate"] = true;
  if (keys.integer("%.nextn_predict_layers").value_or(0) != 0) {
    throw keys.error(ErrorCode::unsupported, "%.nextn_predict_layers", "layers that predict further tokens");
  }
}

void read_shared(const GgufKeys& keys, io::Json& config) {
  read_experts(keys, true, config);
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
  config["shared_expert_intermediate_size"] = keys.size("%.expert_shared_feed_forward_length");
}

}  // namespace

void write_qwen3_5(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_delta_net(config, prefix, metadata);
  write_picture_pairs(config, prefix, thirds_in_turn(config), metadata);
}

void write_qwen3_5_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_qwen3_5(config, prefix, metadata);
  write_shared(config, prefix, metadata);
}

void write_qwen3_next(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_delta_net(config, prefix, metadata);
  write_shared(config, prefix, metadata);
}

void read_qwen3_5(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_delta_net(keys, config);
  read_picture_pairs(keys, true, config);
}

void read_qwen3_5_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  read_qwen3_5(file, keys, config);
  read_shared(keys, config);
}

void read_qwen3_next(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_delta_net(keys, config);
  read_shared(keys, config);
}

}  // namespace w4q::gguf
