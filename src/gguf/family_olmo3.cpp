// Olmo 3 has the name of Olmo 2: three layers with a window, which turn without scaling, and one that sees everything.
#include <algorithm>
#include <vector>

#include "core/text.h"
#include "gguf/family_rows.h"

namespace w4q::gguf {
namespace {

using model::ModelConfig;

/// Readers let each so many-th layer see everything.
constexpr int64_t interval = 4;

}  // namespace

void write_olmo2(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  demand_own_head(config);
  demand(config.head_dim * config.heads == config.hidden_size, config, "head_dim that is not hidden_size over heads");
}

void write_olmo3(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_olmo2(config, prefix, metadata);
  const int64_t window = *std::ranges::max_element(config.sliding_window);
  if (window == 0) return;
  std::vector<bool> pattern;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const bool local = (layer + 1) % interval != 0;
    demand(config.sliding_window[static_cast<size_t>(layer)] == (local ? window : 0), config,
           concat("the window of layer ", layer));
    const model::RopeConfig& rope = config.attention_of(layer).rope;
    const bool plain = rope.type == model::RopeType::standard && rope.theta == config.rope.theta;
    demand(!local || plain, config, concat("rope_parameters of layer ", layer));
    pattern.push_back(local);
  }
  metadata.push_back({prefix + "attention.sliding_window", u32(window)});
  metadata.push_back({prefix + "attention.sliding_window_pattern", io::GgufArray(std::move(pattern))});
}

void read_olmo3(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["sliding_window"] = keys.size("%.attention.sliding_window");
  config["layer_types"] = layer_types(keys, config, interval, "sliding_attention", "full_attention");
  if (const auto* pattern = keys.booleans("%.attention.sliding_window_pattern"); pattern != nullptr) {
    for (size_t layer = 0; layer < std::min(pattern->size(), config["layer_types"].size()); ++layer) {
      config["layer_types"][layer] = (*pattern)[layer] ? "sliding_attention" : "full_attention";
    }
  }
  const io::Json theta = config["rope_theta"];
  const double local = keys.number("%.rope.freq_base_swa").value_or(theta.get<double>());
  io::Json scaled = config["rope_scaling"].is_null() ? io::Json{{"rope_type", "default"}} : config["rope_scaling"];
  scaled["rope_theta"] = theta;
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"full_attention", std::move(scaled)},
                               {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", local}}}};
}

}  // namespace w4q::gguf
