#include "pipeline/activation_scales.h"

#include <algorithm>
#include <cmath>

#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "model/decoder_layer.h"
#include "model/layer_plan.h"
#include "model/model.h"
#include "model/opened.h"

namespace w4q::pipeline {
namespace {

using Inputs = std::map<std::string, float, std::less<>>;

float largest_of(const float* values, int64_t count) noexcept {
  return formats::table_max({values, static_cast<size_t>(count)});
}

void raise(float& largest, float value) noexcept { largest = std::max(largest, value); }

/// What `rows` positions of a cache hold.
ActivationMaxima::Cache largest_of(const kernels::KeyValueCache& cache, int64_t rows) noexcept {
  ActivationMaxima::Cache result;
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const int64_t at = head * cache.capacity * cache.head_dim;
    raise(result.keys, largest_of(cache.keys + at, rows * cache.head_dim));
    raise(result.values, largest_of(cache.values + at, rows * cache.head_dim));
  }
  return result;
}

/// The attention of a layer that has a cache of its own; empty: it has none.
std::string cached_attention(const model::ModelConfig& config, int64_t layer) {
  for (const auto& linear : model::layer_plan(config, layer).linears()) {
    if (linear.role != model::Role::key && linear.role != model::Role::query_key_value) continue;
    return std::string(checkpoint::parent(linear.name));
  }
  return {};
}

/// Experts of a mixture that no row went to have the largest of its others.
void fill_experts(Inputs& inputs) {
  std::map<std::string, float, std::less<>> mixtures;
  const auto kind = [](std::string_view path) -> std::string {
    const auto place = checkpoint::expert_place(path);
    return place.mixture.empty() ? std::string() : std::string(place.mixture) + "." + std::string(place.projection);
  };
  for (const auto& [path, value] : inputs) raise(mixtures[kind(path)], value);
  for (auto& [path, value] : inputs) {
    if (value == 0 && !kind(path).empty()) value = mixtures[kind(path)];
  }
}

}  // namespace

std::vector<std::string> cached_attentions(const model::ModelConfig& config) {
  std::vector<std::string> result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (std::string path = cached_attention(config, layer); !path.empty()) result.push_back(std::move(path));
  }
  return result;
}

std::string activation_obstacle(const checkpoint::DialectRow* dialect, const ActivationRequest& wanted) {
  if (wanted.empty()) return {};
  const auto* const form = dialect == nullptr ? nullptr : dialect->activation_form;
  const std::string_view name = dialect == nullptr ? "w4q" : dialect->name;
  if (form == nullptr) return concat("--to ", name, " has no scales of activations");
  if (!wanted.inputs || !form->float8.empty()) return {};
  return concat("--to ", name, " has scales of the cache, and none of inputs (--activation-scales)");
}

void require_cache(const std::filesystem::path& model, const ActivationRequest& wanted) {
  if (!wanted.cache) return;
  const model::ModelConfig config = model::open_model(model).config;
  if (!cached_attentions(config).empty()) return;
  throw Error(ErrorCode::unsupported,
              concat("--cache-scales: no attention of ", config.architecture_name, " keeps keys and values by heads"))
      .detail(
          "expected k_proj and v_proj, or one of query, key and value; found latents, or none, for which programs "
          "have no k_scale and v_scale")
      .hint("leave out --cache-scales");
}

ActivationMaxima measure_activations(const std::filesystem::path& folder, const CalibrationText& text) {
  const auto model = model::Model::open(folder);
  const model::ModelConfig& config = model.config();
  model::require_decoder(config, "calibration");
  const auto windows = read_windows(model::open_model(folder), fitted(text, config));
  ActivationMaxima result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& linear : model::layer_plan(config, layer).linears()) result.inputs.emplace(linear.name, 0.0f);
  }
  const model::Observer observer{.hidden = {}, .linear_input = [&](const auto& linears, auto input) {
                                   float largest = 0;
                                   for (int64_t r = 0; r < input.rows; ++r)
                                     raise(largest, largest_of(input.row(r), input.cols));
                                   for (const auto& name : linears) raise(result.inputs[std::string(name)], largest);
                                 }};
  model::LayerDecoder decoder(config);
  model::LayerMemories memories(config, windows.length);
  model::Floats hidden, own;
  decoder.set_positions(0, windows.length);
  Progress progress("activations", windows.samples, "windows");
  for (int64_t sample = 0; sample < windows.samples; ++sample) {
    const auto x = hidden.matrix(windows.length, config.hidden_size);
    model::begin_hidden(model, windows.window(sample), decoder, own, x);
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      decoder.run(model.layers()[static_cast<size_t>(layer)], memories.layer(layer), x, &observer);
      const std::string path = cached_attention(config, layer);
      if (path.empty()) continue;
      const auto seen = largest_of(memories.layer(layer).cache, windows.length);
      auto& cache = result.caches[path];
      raise(cache.keys, seen.keys);
      raise(cache.values, seen.values);
    }
    progress.advance(1);
  }
  fill_experts(result.inputs);
  return result;
}

}  // namespace w4q::pipeline
