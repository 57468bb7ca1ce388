// Phi-3: q, k and v as one matrix, gate and up as one, and two lists of divisors of frequencies.
#include <cmath>

#include "core/text.h"
#include "gguf/config.h"
#include "gguf/family_rows.h"
#include "gguf/rope.h"

namespace w4q::gguf {
namespace {

constexpr std::string_view original_key = "rope.scaling.original_context_length",
                           factor_key = "rope.scaling.attn_factor";

}  // namespace

void write_phi3(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand(config.head_dim * config.heads == config.hidden_size, config, "head_dim");
  const model::RopeConfig& rope = config.rope;
  if (rope.type != model::RopeType::longrope) {
    model::RopeConfig whole = rope;
    whole.partial_rotary_factor = 1;
    return rope_scaling_to_gguf(whole, prefix.substr(0, prefix.size() - 1), metadata);
  }
  metadata.push_back({concat(prefix, original_key), u32(rope.original_max_positions)});
  metadata.push_back({concat(prefix, factor_key), static_cast<float>(rope.attention_factor)});
}

void read_phi3(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  const int64_t head_dim = config["head_dim"].get<int64_t>();
  const int64_t pairs = keys.size("%.rope.dimension_count", head_dim) / 2;
  const auto original = keys.integer(concat("%.", original_key));
  if (!has(file, rope_long_tensor)) {
    config["rope_scaling"] = rope_scaling_from_gguf(keys, {}, 0, 0);
    return;
  }
  const auto numbers = [&](std::string_view tensor) {
    std::vector<double> values;
    for (const float value : read_rope_factors(file, keys, tensor, pairs)) values.push_back(shortest_decimal(value));
    return values;
  };
  config["rope_scaling"] = {
      {"type", "longrope"}, {"short_factor", numbers(rope_short_tensor)}, {"long_factor", numbers(rope_long_tensor)}};
  config["original_max_position_embeddings"] = original.value_or(config["max_position_embeddings"].get<int64_t>());
  // What follows from the lengths is left out; published files state no other.
  const double stretch =
      config["max_position_embeddings"].get<double>() / config["original_max_position_embeddings"].get<double>();
  const double usual =
      stretch <= 1
          ? 1
          : std::sqrt(1 + std::log(stretch) / std::log(config["original_max_position_embeddings"].get<double>()));
  const double stated = keys.number(concat("%.", factor_key)).value_or(1);
  if (std::abs(stated / usual - 1) > 1e-6) config["rope_scaling"]["attention_factor"] = stated;
}

}  // namespace w4q::gguf
