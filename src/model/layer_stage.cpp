#include "model/layer_stage.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "model/layer_plan.h"

namespace w4q::model {
namespace {

int64_t stored_bytes(const OpenedModel& model, const PlannedLinear& linear) {
  if (const auto* packed = model.folder.quantization.find(linear.name)) return checkpoint::stored_bytes(*packed);
  return model.folder.tensors.at(linear.name + ".weight").size();
}

/// How many stretches of at most `most` bytes it takes from layer to layer.
int stretches(const std::vector<int64_t>& bytes, int64_t most) {
  int count = 1;
  int64_t sum = 0;
  for (const int64_t each : bytes) {
    if (sum > 0 && sum + each > most) ++count, sum = 0;
    sum += each;
  }
  return count;
}

bool reads_others_keys(const ModelConfig& config) {
  return std::ranges::any_of(config.attention, [](const auto& layer) { return layer.keys_of.has_value(); });
}

}  // namespace

bool can_be_split(const ModelConfig& config) { return !reads_others_keys(config) && config.layer_embedding_size == 0; }

std::vector<int64_t> stored_layer_bytes(const OpenedModel& model) {
  std::vector<int64_t> bytes;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    int64_t sum = 0;
    for (const auto& linear : layer_plan(model.config, layer).linears()) sum += stored_bytes(model, linear);
    bytes.push_back(sum);
  }
  bytes.front() += stored_bytes(model, embedding_plan(model.config));
  bytes.back() += stored_bytes(model, has_tied_head(model) ? embedding_plan(model.config) : head_plan(model.config));
  return bytes;
}

std::vector<LayerRange> cut_layers(const std::vector<int64_t>& bytes, int parts) {
  const auto layers = static_cast<int64_t>(bytes.size());
  ensure(parts >= 1 && parts <= layers, "cut_layers: more parts than layers");
  int64_t low = std::max<int64_t>(1, std::ranges::max(bytes)), high = 0;
  for (const int64_t each : bytes) high += each;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (stretches(bytes, middle) <= parts) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  std::vector<LayerRange> result;
  int64_t first = 0;
  for (int part = 0; part < parts; ++part) {
    const int64_t left = parts - 1 - part;  // each of which gets one at least
    int64_t end = first + 1, sum = bytes[static_cast<size_t>(first)];
    while (end < layers - left && (left == 0 || sum + bytes[static_cast<size_t>(end)] <= low)) {
      sum += bytes[static_cast<size_t>(end++)];
    }
    result.push_back({first, end});
    first = end;
  }
  return result;
}

std::vector<LayerRange> split_layers(const OpenedModel& model, int parts) {
  if (parts == 1) return {{0, model.config.layers}};
  const auto& config = model.config;
  if (!can_be_split(config)) {
    throw Error(ErrorCode::unsupported, concat("several ranks cannot hold ", config.architecture_name, " together"))
        .detail(reads_others_keys(config) ? "its last layers read the keys and values of earlier ones"
                                          : "its layers have embeddings of their own")
        .hint("leave out --split-layers");
  }
  if (parts > model.config.layers) {
    throw Error(ErrorCode::bad_argument,
                concat("a model of ", model.config.layers, " layers cannot be held by ", parts, " ranks"))
        .hint(concat("--split-layers ", model.config.layers, " at most"));
  }
  return cut_layers(stored_layer_bytes(model), parts);
}

ModelConfig config_of(const ModelConfig& whole, const LayerRange& layers) {
  ModelConfig config = whole;
  config.layers = layers.count();
  const auto cut = [&](auto& each) {
    if (each.empty()) return;
    each.erase(each.begin() + static_cast<ptrdiff_t>(layers.end), each.end());
    each.erase(each.begin(), each.begin() + static_cast<ptrdiff_t>(layers.first));
  };
  cut(config.attention);
  cut(config.intermediate_sizes);
  cut(config.delta_layers);
  cut(config.mixture_layers);
  cut(config.sliding_window);
  return config;
}

LayerStage::LayerStage(ranks::Ranks& ranks, int split)
    : ranks_(&ranks),
      index_(ranks.rank() % split),
      count_(split),
      group_(ranks.rank() / split),
      groups_(ranks.size() / split) {
  ensure(ranks.size() % split == 0, "LayerStage: ranks that belong to no group");
}

void LayerStage::receive(MatrixView<float> hidden) const {
  const std::string bytes = ranks_->receive(ranks_->rank() - 1);
  const auto row = static_cast<size_t>(hidden.cols) * sizeof(float);
  ensure(bytes.size() == row * static_cast<size_t>(hidden.rows), "hidden states of another size came from a rank");
  for (int64_t r = 0; r < hidden.rows; ++r) {
    std::memcpy(hidden.row(r), bytes.data() + static_cast<size_t>(r) * row, row);
  }
}

void LayerStage::send(MatrixView<const float> hidden) const {
  std::string bytes;
  const auto row = static_cast<size_t>(hidden.cols) * sizeof(float);
  bytes.reserve(row * static_cast<size_t>(hidden.rows));
  for (int64_t r = 0; r < hidden.rows; ++r) bytes.append(reinterpret_cast<const char*>(hidden.row(r)), row);
  ranks_->send(ranks_->rank() + 1, std::move(bytes));
}

int32_t LayerStage::share(int32_t token) const {
  if (count_ == 1) return token;
  const int from = last_rank(group_);
  if (!last()) {
    const std::string bytes = ranks_->receive(from);
    ensure(bytes.size() == sizeof token, "a token of another size came from a rank");
    std::memcpy(&token, bytes.data(), sizeof token);
    return token;
  }
  for (int stage = 0; stage + 1 < count_; ++stage) {
    ranks_->send(from - count_ + 1 + stage, std::string(reinterpret_cast<const char*>(&token), sizeof token));
  }
  return token;
}

}  // namespace w4q::model
