#include "model/layer_memory.h"

#include <algorithm>
#include <limits>
#include <new>

#include "core/error.h"
#include "core/text.h"

namespace w4q::model {

void require_layer_by_layer(const ModelConfig& config, std::string_view what) {
  require_decoder(config, what);
  const bool shares =
      std::ranges::any_of(config.attention, [](const auto& layer) { return layer.keys_of.has_value(); });
  if (!shares && config.layer_embedding_size == 0) return;
  throw Error(ErrorCode::unsupported, concat(what, " of ", config.architecture_name))
      .detail(shares ? "its last layers read the keys and values of earlier ones"
                     : "its layers have embeddings of their own")
      .hint("--device cpu calibrates it; sensitivities cannot be measured");
}

LayerMemories::LayerMemories(const ModelConfig& config, int64_t capacity, OneAtATime)
    : config_(&config), capacity_(capacity), planes_(1) {}

LayerMemories LayerMemories::one_at_a_time(const ModelConfig& config, int64_t capacity) {
  return {config, capacity, OneAtATime{}};
}

LayerMemories::LayerMemories(const ModelConfig& config, int64_t capacity)
    : config_(&config), capacity_(capacity), planes_(static_cast<size_t>(config.layers)) {
  int64_t width = 1;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const AttentionConfig attention = config.attention_of(layer);
    width = std::max(width, attention.kv_heads * attention.head_dim);
  }
  constexpr auto most = std::numeric_limits<int64_t>::max() / int64_t{2 * sizeof(float)};
  if (capacity < 1 || capacity > most / width) {
    throw Error(ErrorCode::bad_argument, concat("a context of ", capacity, " positions cannot be held"));
  }
  try {
    for (int64_t index = 0; index < config.layers; ++index) layer(index);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::bad_argument, concat("no memory for the keys and values of ", capacity, " positions"))
        .detail(concat("they take up to ", human_bytes(2 * capacity * width * int64_t{sizeof(float)}), " in each of ",
                       config.layers, " layers"))
        .hint("ask for a shorter context");
  }
}

LayerMemory LayerMemories::layer(int64_t index) {
  const bool one = planes_.size() == 1 && config_->layers != 1;
  LayerMemory result;
  if (config_->has_delta_net(index)) {
    Planes& planes = planes_[one ? 0 : static_cast<size_t>(index)];
    result.delta.history = planes.history.matrix(1, config_->delta.history_size()).data;
    result.delta.state = planes.state.matrix(1, config_->delta.state_size()).data;
    return result;
  }
  const AttentionConfig attention = config_->attention_of(index);
  ensure(!one || !attention.keys_of, "LayerMemories: a layer reads another one's keys");
  Planes& planes = planes_[one ? 0 : static_cast<size_t>(attention.keys_of.value_or(index))];
  const int64_t width = attention.kv_heads * attention.head_dim;
  result.cache = {planes.keys.matrix(capacity_, width).data, planes.values.matrix(capacity_, width).data,
                  attention.kv_heads, capacity_, attention.head_dim};
  return result;
}

namespace {

/// Layers whose keys and values later ones read.
std::vector<int64_t> sources(const ModelConfig& config) {
  std::vector<int64_t> result;
  for (const auto& attention : config.attention) {
    if (attention.keys_of && std::ranges::find(result, *attention.keys_of) == result.end()) {
      result.push_back(*attention.keys_of);
    }
  }
  return result;
}

}  // namespace

WalkMemories::WalkMemories(const ModelConfig& config, int64_t sequences, int64_t capacity)
    : config_(&config), capacity_(capacity), others_(LayerMemories::one_at_a_time(config, capacity)) {
  const auto count = static_cast<size_t>(sequences);
  for (const int64_t layer : sources(config))
    kept_.push_back({layer, std::vector<Floats>(count), std::vector<Floats>(count)});
}

LayerMemory WalkMemories::layer(int64_t index, int64_t sequence) {
  const AttentionConfig attention = config_->attention_of(index);
  const auto kept = std::ranges::find(kept_, attention.keys_of.value_or(index), &Kept::layer);
  if (kept == kept_.end()) return others_.layer(index);
  const auto at = static_cast<size_t>(sequence);
  const int64_t width = attention.kv_heads * attention.head_dim;
  LayerMemory result;
  result.cache = {kept->keys[at].matrix(capacity_, width).data, kept->values[at].matrix(capacity_, width).data,
                  attention.kv_heads, capacity_, attention.head_dim};
  return result;
}

void WalkMemories::swap_from(int64_t first, WalkMemories& other) noexcept {
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (kept_[i].layer >= first) std::swap(kept_[i], other.kept_[i]);
  }
}

int64_t WalkMemories::kept_bytes(const ModelConfig& config, int64_t sequences, int64_t capacity) {
  int64_t width = 0;
  for (const int64_t layer : sources(config)) {
    const AttentionConfig attention = config.attention_of(layer);
    width += attention.kv_heads * attention.head_dim;
  }
  return 2 * width * sequences * capacity * int64_t{sizeof(float)};
}

}  // namespace w4q::model
