#include "pipeline/mix_meter.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "pipeline/plan.h"
#include "pipeline/sensitivity.h"
#include "ranks/exchange.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t most_stream_bytes = int64_t{1} << 30;

}  // namespace

CalibrationWindows mix_windows(const CalibrationWindows& windows) {
  constexpr int64_t most_windows = 8, most_tokens = 256;
  return thinned(windows, most_windows, most_tokens);
}

bool can_measure_mixes(const model::ModelConfig& config) { return config.architecture != nullptr; }

MixMeter::MixMeter(const model::OpenedModel& model, const CalibrationWindows& windows,
                   const std::vector<MixItem>& items, const WidthStore& store, std::function<void()> on_run,
                   ranks::Ranks* ranks)
    : model_(model),
      config_(model.config),
      windows_(windows),
      items_(items),
      store_(store),
      on_run_(std::move(on_run)),
      ranks_(*ranks),
      meter_(model),
      decoder_(config_),
      memories_(config_, windows.samples, windows.length),
      tried_memories_(config_, windows.samples, windows.length) {
  ensure(can_measure_mixes(config_), "MixMeter: a model that is not decoded");
  decoder_.set_positions(0, windows.length);
  const auto states = static_cast<size_t>(config_.layers) + 1;
  states_.resize(states);
  tried_.resize(states);
  for (size_t i = 0; i < items_.size(); ++i) {
    index_.emplace(items_[i].module, i);
    for (const auto& other : items_[i].others) index_.emplace(other, i);
    accepted_.push_back(items_[i].widths);
  }
  embed();
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    states_[at + 1] = states_[at];
    run(load(layer, accepted_), layer, 0, states_[at + 1]);
  }
  memories_.swap_from(0, tried_memories_);
  expected_ = states_.back();
  measured_ = accepted_;
  tried_from_ = config_.layers;
}

/// Hidden states 0, and what layers add of their own, which follows from these.
void MixMeter::embed() {
  const auto embeddings = model::load_embeddings(model_);
  const auto own = model::load_layer_embeddings(model_);
  states_[0].resize(static_cast<size_t>(tokens() * config_.hidden_size));
  for (int64_t w = 0; w < windows_.samples; ++w) {
    float* first = states_[0].data() + w * windows_.length * config_.hidden_size;
    const MatrixView<float> hidden(first, windows_.length, config_.hidden_size);
    model::embed(config_, embeddings, windows_.window(w), hidden);
    if (!own) continue;
    own_.emplace_back(static_cast<size_t>(windows_.length * own->table.k));
    model::embed_layers(config_, *own, windows_.window(w), hidden, {own_.back().data(), windows_.length, own->table.k});
  }
}

model::LayerWeights MixMeter::load(int64_t layer, const Mix& mix) const {
  auto weights = model::load_layer(model_, layer);
  for (auto& linear : weights.linears) {
    const auto found = index_.find(linear.name);
    if (found == index_.end() || mix[found->second] == items_[found->second].widths) continue;
    linear = store_.load(linear, items_[found->second].first + mix[found->second]);
  }
  return weights;
}

/// Keys and values of layers before the walk are those of the accepted mix.
model::LayerMemory MixMeter::memory(int64_t layer, int64_t window, int64_t from) {
  const int64_t source = config_.has_delta_net(layer) ? layer : config_.attention_of(layer).keys_of.value_or(layer);
  return (source < from ? memories_ : tried_memories_).layer(layer, window);
}

void MixMeter::run(const model::LayerWeights& weights, int64_t layer, int64_t from, Stream& stream) {
  const int64_t size = windows_.length * config_.hidden_size;
  for (int64_t w = 0; w < windows_.samples; ++w) {
    if (!own_.empty()) {
      const auto& own = own_[static_cast<size_t>(w)];
      const auto width = static_cast<int64_t>(own.size()) / windows_.length;
      decoder_.set_layer_embeddings({own.data(), windows_.length, width});
    }
    decoder_.run(weights, memory(layer, w, from), {stream.data() + w * size, windows_.length, config_.hidden_size});
    check_interrupt();
  }
  if (on_run_) on_run_();
}

std::vector<double> MixMeter::per_token(std::span<const Stream* const> streams) const {
  auto result = meter_.measure(expected_, streams);
  for (double& value : result) {
    const double mean = value / static_cast<double>(tokens());
    value = std::max(0.0, mean);  // what is nothing but rounding may come out below zero
    if (std::isfinite(mean)) continue;
    throw Error(ErrorCode::bad_file, "predictions are not finite where widths are measured")
        .detail(concat("on ", windows_.samples, " × ", windows_.length, " tokens"))
        .hint("w4q verify MODEL --ppl TEXT shows whether the model itself is sound");
  }
  return result;
}

int64_t MixMeter::first_difference(const Mix& mix) const {
  int64_t first = config_.layers;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (mix[i] != accepted_[i]) first = std::min(first, items_[i].layer);
  }
  return first;
}

double MixMeter::measure(const Mix& mix) {
  tried_from_ = first_difference(mix);
  const Stream* before = &states_[static_cast<size_t>(tried_from_)];
  for (int64_t layer = tried_from_; layer < config_.layers; ++layer) {
    Stream& next = tried_[static_cast<size_t>(layer) + 1];
    next = *before;
    run(load(layer, mix), layer, tried_from_, next);
    before = &next;
  }
  measured_ = mix;
  divergence_ = per_token(std::span(&before, 1)).front();
  ranks::exchange(ranks_, std::span(&divergence_, 1), [](size_t) { return 0; });  // unlike machines, too, choose alike
  return divergence_;
}

void MixMeter::accept() {
  for (auto layer = static_cast<size_t>(tried_from_) + 1; layer < states_.size(); ++layer) {
    std::swap(states_[layer], tried_[layer]);
  }
  memories_.swap_from(tried_from_, tried_memories_);
  tried_from_ = config_.layers;
  accepted_ = measured_;
  accepted_divergence_ = divergence_;
}

/// In model order, one after the other to the ranks in turn.
std::vector<MixMeter::Change> MixMeter::changes() const {
  std::vector<Change> result;
  for (size_t i = 0; i < items_.size(); ++i) {
    for (size_t choice = 0; choice < items_[i].choices(); ++choice) {
      const auto turn = result.size() % static_cast<size_t>(ranks_.size());
      if (choice != accepted_[i]) result.push_back({i, choice, static_cast<int>(turn)});
    }
  }
  return result;
}

/// The linears of an item as `choice` has them.
void MixMeter::exchange(const MixItem& item, size_t choice, const model::LayerWeights& plain,
                        model::LayerWeights& weights) const {
  const size_t index = index_.find(item.module)->second;
  for (size_t at = 0; at < plain.linears.size(); ++at) {
    const auto found = index_.find(plain.linears[at].name);
    if (found == index_.end() || found->second != index) continue;
    weights.linears[at] =
        choice == item.widths ? plain.linears[at] : store_.load(plain.linears[at], item.first + choice);
  }
}

/// Of changes in one layer, each by itself.
std::vector<double> MixMeter::divergences(int64_t layer, std::span<const Change> changes) {
  std::vector<Stream> streams(changes.size(), states_[static_cast<size_t>(layer)]);
  const auto plain = model::load_layer(model_, layer);
  auto weights = load(layer, accepted_);
  for (size_t i = 0; i < changes.size(); ++i) {
    const auto& item = items_[changes[i].item];
    const auto accepted = weights.linears;
    exchange(item, changes[i].choice, plain, weights);
    run(weights, layer, layer, streams[i]);
    weights.linears = accepted;
  }
  for (int64_t next = layer + 1; next < config_.layers; ++next) {
    const auto later = load(next, accepted_);
    for (auto& stream : streams) run(later, next, layer, stream);
  }
  std::vector<const Stream*> found;
  for (const auto& stream : streams) found.push_back(&stream);
  return per_token(found);
}

std::vector<std::vector<double>> MixMeter::effects() {
  const int64_t bytes = tokens() * config_.hidden_size * static_cast<int64_t>(sizeof(float));
  const bool shares =
      std::ranges::any_of(config_.attention, [](const auto& layer) { return layer.keys_of.has_value(); });
  const auto at_once = shares ? 1 : static_cast<size_t>(std::max<int64_t>(1, most_stream_bytes / bytes));
  const auto all = changes();
  std::vector<double> values(all.size());
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    std::vector<size_t> mine;
    std::vector<Change> own;
    for (size_t i = 0; i < all.size(); ++i) {
      if (items_[all[i].item].layer != layer || all[i].rank != ranks_.rank()) continue;
      mine.push_back(i);
      own.push_back(all[i]);
    }
    for (size_t first = 0; first < own.size(); first += at_once) {
      const auto some = std::span(own).subspan(first, std::min(at_once, own.size() - first));
      const auto found = divergences(layer, some);
      for (size_t i = 0; i < some.size(); ++i) values[mine[first + i]] = found[i];
    }
  }
  ranks::exchange(ranks_, values, [&](size_t i) { return all[i].rank; });
  std::vector<std::vector<double>> result;
  for (const auto& item : items_) result.emplace_back(item.choices(), accepted_divergence_);
  for (size_t i = 0; i < all.size(); ++i) result[all[i].item][all[i].choice] = values[i];
  return result;
}

int64_t MixMeter::memory(const model::OpenedModel& model, const CalibrationWindows& windows) {
  const auto& config = model.config;
  const int64_t stream = windows.samples * windows.length * config.hidden_size * static_cast<int64_t>(sizeof(float));
  int64_t largest = 0, changes = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto linears = model::layer_plan(config, layer).linears();
    int64_t weights = 0;
    for (const auto& linear : linears) weights += linear.n * linear.k;
    largest = std::max(largest, weights);
    changes = std::max(changes, static_cast<int64_t>(3 * linears.size()));
  }
  const int64_t at_once = std::min(changes * stream, std::max(stream, most_stream_bytes));
  const int64_t own = windows.samples * windows.length * config.layers * config.layer_embedding_size * 4;
  const int64_t keys = 2 * model::WalkMemories::kept_bytes(config, windows.samples, windows.length);
  return base_memory + (2 * config.layers + 3) * stream + at_once + own + keys +
         largest * static_cast<int64_t>(sizeof(float)) + model.folder.tensors.total_bytes();
}

int64_t MixMeter::effect_runs(const model::ModelConfig& config, const std::vector<MixItem>& items) {
  int64_t runs = 0;
  for (const auto& item : items) {
    runs += static_cast<int64_t>(item.choices()) * (config.layers - item.layer);
  }
  return runs;
}

}  // namespace w4q::pipeline
