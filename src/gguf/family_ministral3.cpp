// Ministral 3: yarn whose magnitude is taken back, queries that grow beyond the original positions.
#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "gguf/family_rows.h"
#include "gguf/rope.h"

namespace w4q::gguf {
namespace {

constexpr std::string_view multiplier = "rope.scaling.yarn_log_multiplier";
constexpr std::string_view original = "rope.scaling.original_context_length";
constexpr std::string_view temperature = "attention.temperature_scale";

}  // namespace

void write_ministral3(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  model::RopeConfig rope = config.rope;
  const bool stretched = rope.type == model::RopeType::yarn && rope.factor > 1;
  if (stretched && rope.attention_factor == 1) {
    rope.attention_factor = usual_magnitude(rope.factor);
    metadata.push_back({prefix + std::string(multiplier), 1.0f});
  }
  rope_scaling_to_gguf(rope, prefix.substr(0, prefix.size() - 1), metadata);
  const model::AttentionConfig& attention = config.attention.front();
  if (attention.temperature == 0) return;
  demand(rope.type != model::RopeType::yarn || rope.original_max_positions == attention.temperature_length, config,
         concat("queries that grow beyond ", attention.temperature_length, " positions"));
  set(metadata, prefix + std::string(original), u32(attention.temperature_length));
  metadata.push_back({prefix + std::string(temperature), static_cast<float>(attention.temperature)});
}

void read_ministral3(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  io::Json rope = rope_scaling_from_gguf(keys, {}, 0, 0, concat("%.", multiplier));
  if (rope.is_null()) rope = {{"rope_type", "default"}};
  rope["rope_theta"] = config["rope_theta"];
  const auto grows = keys.number(concat("%.", temperature));
  rope["llama_4_scaling_beta"] = grows.value_or(0);
  if (grows.value_or(0) != 0) {
    rope["original_max_position_embeddings"] = keys.size(concat("%.", original), keys.size("%.context_length"));
  }
  config.erase("rope_scaling");
  config["rope_parameters"] = std::move(rope);
}

}  // namespace w4q::gguf
