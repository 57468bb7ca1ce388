// Hybrids of gated delta nets and attention, qwen3next, qwen35, qwen35moe, and text models of those that see, qwen3vl,
// qwen3vlmoe.
#include <algorithm>
#include <vector>

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
  metadata.push_back({prefix + "full_attention_interval", u32(interval)});
  metadata.push_back({prefix + "ssm.conv_kernel", u32(delta.taps)});
  metadata.push_back({prefix + "ssm.state_size", u32(delta.key_dim)});
  metadata.push_back({prefix + "ssm.group_count", u32(delta.key_heads)});
  metadata.push_back({prefix + "ssm.time_step_rank", u32(delta.value_heads)});
  metadata.push_back({prefix + "ssm.inner_size", u32(delta.values())});
}

/// Which pairs turn with which of a picture's positions; where config.json is silent, each third one in turn.
void write_sections(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto pairs = static_cast<int64_t>(static_cast<double>(config.head_dim) * config.rope.partial_rotary_factor) / 2;
  std::vector<int64_t> sections = config.rope.picture_pairs;
  if (sections.empty()) sections = {(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3};
  int64_t all = 0;
  for (const int64_t section : sections) all += section;
  demand(sections.size() == 3 && all == pairs, config, concat("mrope_section that is not three parts of ", pairs));
  std::vector<int32_t> stated(sections.begin(), sections.end());
  stated.push_back(0);
  metadata.push_back({prefix + "rope.dimension_sections", io::GgufArray(std::move(stated))});
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

/// Pairs that turn with each of a picture's positions.
void read_sections(const GgufKeys& keys, io::Json& config) {
  io::Json rope = {{"rope_type", "default"}, {"mrope_interleaved", true}};
  if (!config["rope_scaling"].is_null()) rope.update(config["rope_scaling"]);
  rope["rope_theta"] = config["rope_theta"];
  const auto* sections = keys.integers("%.rope.dimension_sections");
  if (sections != nullptr && sections->size() >= 3) {
    rope["mrope_section"] = std::vector<int32_t>(sections->begin(), sections->begin() + 3);
  }
  config.erase("rope_scaling");
  config["rope_parameters"] = std::move(rope);
}

}  // namespace

void write_qwen3_vl(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_sections(config, prefix, metadata);
}

void write_qwen3_vl_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_sections(config, prefix, metadata);
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
}

void read_qwen3_vl(const io::GgufFile&, const GgufKeys& keys, io::Json& config) { read_sections(keys, config); }

void read_qwen3_vl_moe(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_sections(keys, config);
  read_experts(keys, true, config);
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
}

void write_qwen3_5(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_delta_net(config, prefix, metadata);
  write_sections(config, prefix, metadata);
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
  read_sections(keys, config);
  config["rope_parameters"]["partial_rotary_factor"] = config["partial_rotary_factor"];
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
