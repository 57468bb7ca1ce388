// gpt-oss: sinks, windows in every other layer, experts with biases and clamped gates.
#include "core/text.h"
#include "gguf/family_rows.h"
#include "gguf/rope.h"

namespace w4q::gguf {
namespace {

/// Readers compute gates with it.
constexpr double limit = 7, slope = 1.702;

}  // namespace

void write_gpt_oss(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
  demand(config.activation_limit == limit, config, concat("swiglu_limit ", config.activation_limit));
  demand(config.activation_slope == slope, config, concat("swiglu_alpha ", config.activation_slope));
  demand(config.output_bias, config, "attention without biases");
  demand_own_head(config);
  const int64_t window = config.sliding_window.front();
  demand(window > 0, config, "a first layer without a window");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const int64_t expected = layer % 2 == 0 ? window : 0;
    demand(config.sliding_window[static_cast<size_t>(layer)] == expected, config,
           concat("the window of layer ", layer));
  }
  metadata.push_back({prefix + "attention.sliding_window", u32(window)});
  model::RopeConfig rope = config.rope;
  rope.truncate = true;  // what readers do, and gpt-oss does not
  rope_scaling_to_gguf(rope, prefix.substr(0, prefix.size() - 1), metadata);
}

void read_gpt_oss(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["num_local_experts"] = keys.size("%.expert_count");
  config["num_experts_per_tok"] = keys.size("%.expert_used_count");
  config["intermediate_size"] = keys.size("%.expert_feed_forward_length");
  config["sliding_window"] = keys.size("%.attention.sliding_window");
  config["swiglu_limit"] = limit;
  config["layer_types"] = layer_types(keys, config, 2, "sliding_attention", "full_attention");
  config["rope_scaling"] = rope_scaling_from_gguf(keys, {}, 0, 0);
  if (config["rope_scaling"].is_null()) config["rope_scaling"] = {{"rope_type", "default"}};
  if (config["rope_scaling"]["rope_type"] == "yarn") config["rope_scaling"]["truncate"] = false;
}

}  // namespace w4q::gguf
