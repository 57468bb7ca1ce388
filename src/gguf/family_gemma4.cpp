// Gemma 4: layers of two kinds, of which the last ones may read other layers' keys, and experts beside an MLP.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"
#include "gguf/config.h"
#include "gguf/family_rows.h"

namespace w4q::gguf {
namespace {

using model::AttentionConfig;
using model::ModelConfig;

/// The first layer with a window, or without.
const AttentionConfig* first_of(const ModelConfig& config, bool slides) {
  const auto found = std::ranges::find_if(config.sliding_window, [&](int64_t each) { return (each > 0) == slides; });
  if (found == config.sliding_window.end()) return nullptr;
  return &config.attention[static_cast<size_t>(found - config.sliding_window.begin())];
}

void demand_layers(const ModelConfig& config, const AttentionConfig& narrow, const AttentionConfig& wide,
                   int64_t own_keys) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const AttentionConfig& attention = config.attention[at];
    const bool slides = config.sliding_window[at] > 0;
    const AttentionConfig& like = slides ? narrow : wide;
    const auto same = [&](bool holds, std::string_view what) {
      demand(holds, config, concat(what, " of layer ", layer));
    };
    same(attention.head_dim == like.head_dim && attention.rope == like.rope, "head_dim or rope");
    same(attention.scale == 1 && attention.value_norm, "attention");
    same(!slides || config.sliding_window[at] == narrow.window, "sliding_window");
    // Readers take the keys of the last two layers that have some: of one with a window and of one without.
    same(attention.keys_of.value_or(layer) == (layer < own_keys ? layer : own_keys - (slides ? 2 : 1)),
         "num_kv_shared_layers, by the keys");
    same(config.has_mixture(layer) == config.has_mixture(0), "experts");
  }
}

void demand_rope(const ModelConfig& config, const model::RopeConfig& narrow, const model::RopeConfig& wide) {
  demand(narrow.type == model::RopeType::standard && narrow.partial_rotary_factor == 1, config,
         "rope_parameters of sliding_attention");
  demand(wide.type == model::RopeType::proportional && wide.factor == 1, config, "rope_parameters of full_attention");
}

template <class Values>
bool differ(const Values& values) {
  return std::ranges::any_of(values, [&](auto each) { return each != values.front(); });
}

/// One number where all layers have it, else a list.
void set_layers(io::GgufMetadata& metadata, const std::string& key, const std::vector<int64_t>& values) {
  if (!differ(values)) return set(metadata, key, u32(values.front()));
  std::vector<int32_t> listed;
  for (const int64_t value : values) listed.push_back(static_cast<int32_t>(value));
  set(metadata, key, io::GgufArray(std::move(listed)));
}

}  // namespace

void write_gemma4(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const AttentionConfig* const narrow = first_of(config, true);
  const AttentionConfig* const wide = first_of(config, false);
  demand(narrow != nullptr && wide != nullptr, config, "layer_types of one kind");
  const auto shares = [](const AttentionConfig& attention) { return attention.keys_of.has_value(); };
  const int64_t shared = std::ranges::count_if(config.attention, shares);
  demand_layers(config, *narrow, *wide, config.layers - shared);
  demand_rope(config, narrow->rope, wide->rope);
  demand(wide->keys_are_values || wide->kv_heads == narrow->kv_heads, config,
         "num_global_key_value_heads of layers with values");
  demand(config.layer_embedding_size == 0 || config.layer_vocab_size == config.vocab_size, config,
         "vocab_size_per_layer_input that is not vocab_size");
  std::vector<int64_t> heads, inner;
  std::vector<bool> pattern;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    heads.push_back(config.attention[static_cast<size_t>(layer)].kv_heads);
    inner.push_back(config.intermediate_of(layer));
    pattern.push_back(config.sliding_window[static_cast<size_t>(layer)] > 0);
  }
  set_layers(metadata, prefix + "attention.head_count_kv", heads);
  set_layers(metadata, prefix + "feed_forward_length", inner);
  for (const char* key : {"attention.key_length", "attention.value_length", "rope.dimension_count"}) {
    set(metadata, prefix + key, u32(wide->head_dim));
    set(metadata, concat(prefix, key, "_swa"), u32(narrow->head_dim));
  }
  set(metadata, prefix + "rope.freq_base", static_cast<float>(wide->rope.theta));
  set(metadata, prefix + "rope.freq_base_swa", static_cast<float>(narrow->rope.theta));
  set(metadata, prefix + "attention.sliding_window", u32(narrow->window));
  set(metadata, prefix + "attention.sliding_window_pattern", io::GgufArray(std::move(pattern)));
  set(metadata, prefix + "attention.shared_kv_layers", u32(shared));
  set(metadata, prefix + "embedding_length_per_layer_input", u32(config.layer_embedding_size));
  set(metadata, prefix + "final_logit_softcapping", static_cast<float>(config.logit_cap));
  if (!config.has_mixture(0)) return;
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
}

namespace {

/// Which share of the pairs turns: those whose factor is 1.
double turning_share(const io::GgufFile& file, const GgufKeys& keys, int64_t head_dim) {
  const auto factors = read_rope_factors(file, keys, rope_factors_tensor, head_dim / 2);
  const auto turning = std::ranges::count(factors, 1.0f);
  constexpr float standing = 1e20f;
  const bool sound = std::ranges::all_of(factors, [&](float each) { return each == 1 || each >= standing; });
  if (turning == 0 || !sound) {
    throw keys.error(ErrorCode::unsupported, rope_factors_tensor, "scales pairs by other factors than 1 and 10^30");
  }
  return static_cast<double>(2 * turning) / static_cast<double>(head_dim);
}

/// Whether some layer without a window has keys of its own and no values.
bool keys_are_values(const io::GgufFile& file, const std::vector<bool>& pattern, int64_t own_keys) {
  for (int64_t layer = 0; layer < own_keys; ++layer) {
    if (!pattern[static_cast<size_t>(layer)] && !has(file, concat("blk.", layer, ".attn_v.weight"))) return true;
  }
  return false;
}

}  // namespace

void read_gemma4(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  const auto layers = config["num_hidden_layers"].get<int64_t>();
  constexpr std::string_view pattern_key = "%.attention.sliding_window_pattern";
  const auto* const pattern = keys.booleans(pattern_key);
  if (pattern == nullptr || std::ssize(*pattern) != layers) {
    throw keys.error(ErrorCode::bad_file, pattern_key, concat("expected one boolean for each of ", layers, " layers"));
  }
  const auto heads = keys.layers("%.attention.head_count_kv", layers);
  const auto inner = keys.layers("%.feed_forward_length", layers);
  const int64_t wide = keys.size("%.attention.key_length");
  const int64_t shared = keys.integer("%.attention.shared_kv_layers").value_or(0);
  io::Json types = io::Json::array();
  for (int64_t layer = 0; layer < layers; ++layer) {
    const bool slides = (*pattern)[static_cast<size_t>(layer)];
    types.push_back(slides ? "sliding_attention" : "full_attention");
    config[slides ? "num_key_value_heads" : "num_global_key_value_heads"] = heads[static_cast<size_t>(layer)];
  }
  config["layer_types"] = std::move(types);
  config["head_dim"] = keys.size("%.attention.key_length_swa");
  config["global_head_dim"] = wide;
  config["attention_k_eq_v"] = keys_are_values(file, *pattern, layers - shared);
  config["num_kv_shared_layers"] = shared;
  config["intermediate_size"] = inner.front();
  config["use_double_wide_mlp"] = inner.front() != inner.back();
  config["sliding_window"] = keys.size("%.attention.sliding_window");
  config["hidden_size_per_layer_input"] = keys.integer("%.embedding_length_per_layer_input").value_or(0);
  config["vocab_size_per_layer_input"] = config["vocab_size"];
  config["hidden_activation"] = "gelu_pytorch_tanh";
  const double cap = keys.number("%.final_logit_softcapping").value_or(0);
  config["final_logit_softcapping"] = cap == 0 ? io::Json(nullptr) : io::Json(cap);
  const double local_theta = keys.number("%.rope.freq_base_swa").value_or(10000);
  config["rope_parameters"] = {{"full_attention",
                                {{"rope_type", "proportional"},
                                 {"partial_rotary_factor", turning_share(file, keys, wide)},
                                 {"rope_theta", config["rope_theta"]}}},
                               {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", local_theta}}}};
  config.erase("rope_scaling");
  config.erase("rope_theta");
  const bool mixes = keys.integer("%.expert_count").value_or(0) > 0;
  config["enable_moe_block"] = mixes;
  if (!mixes) return;
  config["num_experts"] = keys.size("%.expert_count");
  config["top_k_experts"] = keys.size("%.expert_used_count");
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
}

}  // namespace w4q::gguf
