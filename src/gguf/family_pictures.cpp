// Text models of those that see: qwen2vl, qwen3vl, qwen3vlmoe, and what others share with them.
#include <vector>

#include "core/text.h"
#include "gguf/family_rows.h"

namespace w4q::gguf {

using model::ModelConfig;

namespace {

int64_t turning_pairs(const ModelConfig& config) {
  return static_cast<int64_t>(static_cast<double>(config.head_dim) * config.rope.partial_rotary_factor) / 2;
}

}  // namespace

std::vector<int64_t> thirds_in_turn(const ModelConfig& config) {
  const int64_t pairs = turning_pairs(config);
  return {(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3};
}

void write_picture_pairs(const ModelConfig& config, const std::string& prefix, std::vector<int64_t> otherwise,
                         io::GgufMetadata& metadata) {
  const int64_t pairs = turning_pairs(config);
  const auto& sections = config.rope.picture_pairs.empty() ? otherwise : config.rope.picture_pairs;
  int64_t all = 0;
  for (const int64_t section : sections) all += section;
  demand(sections.size() == 3 && all == pairs, config, concat("mrope_section that is not three parts of ", pairs));
  std::vector<int32_t> stated(sections.begin(), sections.end());
  stated.push_back(0);
  metadata.push_back({prefix + "rope.dimension_sections", io::GgufArray(std::move(stated))});
}

void read_picture_pairs(const GgufKeys& keys, bool in_turn, io::Json& config) {
  io::Json rope = {{"rope_type", "default"}};
  if (in_turn) rope["mrope_interleaved"] = true;
  if (!config["rope_scaling"].is_null()) rope.update(config["rope_scaling"]);
  rope["rope_theta"] = config["rope_theta"];
  if (config.contains("partial_rotary_factor")) rope["partial_rotary_factor"] = config["partial_rotary_factor"];
  const auto* sections = keys.integers("%.rope.dimension_sections");
  if (sections != nullptr && sections->size() >= 3) {
    rope["mrope_section"] = std::vector<int32_t>(sections->begin(), sections->begin() + 3);
  }
  config.erase("rope_scaling");
  config["rope_parameters"] = std::move(rope);
}

void write_qwen2_vl(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand(config.head_dim * config.heads == config.hidden_size, config, "head_dim");
  write_picture_pairs(config, prefix, {}, metadata);
}

void read_qwen2_vl(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_picture_pairs(keys, false, config);
}

void write_qwen3_vl(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_picture_pairs(config, prefix, thirds_in_turn(config), metadata);
}

void write_qwen3_vl_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_qwen3_vl(config, prefix, metadata);
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
}

void read_qwen3_vl(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_picture_pairs(keys, true, config);
}

void read_qwen3_vl_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  read_qwen3_vl(file, keys, config);
  read_experts(keys, true, config);
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
}

}  // namespace w4q::gguf
