#include "pipeline/shared_walk.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"
#include "model/model.h"

namespace w4q::pipeline {
namespace {

template <class Value>
void append(std::string& bytes, std::span<const Value> values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

template <class Value>
void take(std::string_view& bytes, std::span<Value> values) {
  ensure(bytes.size() >= values.size_bytes(), "a message between ranks is cut short");
  std::memcpy(values.data(), bytes.data(), values.size_bytes());
  bytes.remove_prefix(values.size_bytes());
}

std::string packed(const LayerStatistics& layer) {
  std::string bytes;
  for (const auto& group : layer) {
    append(bytes, std::span(&group.count, 1));
    for (const auto* sums : {&group.sum_abs, &group.sum_squares, &group.gram}) append(bytes, std::span(*sums));
  }
  return bytes;
}

LayerStatistics unpacked(std::string_view bytes, const std::vector<model::InputGroup>& groups, bool gram) {
  LayerStatistics layer;
  for (const auto& group : groups) {
    auto& sums = layer.emplace_back(quantize::make_statistics(group.width, gram));
    take(bytes, std::span(&sums.count, 1));
    for (auto* values : {&sums.sum_abs, &sums.sum_squares, &sums.gram}) take(bytes, std::span(*values));
  }
  return layer;
}

}  // namespace

CalibrationWindows read_windows(ranks::Ranks& ranks, const model::OpenedModel& model, const CalibrationText& text,
                                device::Context* gpu) {
  CalibrationWindows windows;
  if (ranks.first()) windows = read_windows(model, text, gpu);
  std::string bytes;
  append(bytes, std::span<const int32_t>(windows.ids));
  bytes = ranks.broadcast(std::move(bytes));
  if (ranks.first()) return windows;
  std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
  std::string_view rest = bytes;
  take(rest, std::span(ids));
  return cut_windows(ids, static_cast<int64_t>(ids.size()) / text.length, text.length, "the first rank's text");
}

CalibrationWindows part_of(const CalibrationWindows& windows, int rank, int ranks) {
  const int64_t begin = windows.samples * rank / ranks, end = windows.samples * (rank + 1) / ranks;
  CalibrationWindows part = windows;
  part.samples = end - begin;
  part.ids.assign(windows.ids.begin() + begin * windows.length, windows.ids.begin() + end * windows.length);
  return part;
}

int64_t travelling_memory(const model::ModelConfig& config, const CalibrationOptions& options, int ranks) {
  const bool travel = ranks > 1 && options.gpu == nullptr && !options.pairs;
  return travel ? 3 * statistics_memory(config, options.gram) : 0;
}

SharedWalk::SharedWalk(ranks::Ranks& ranks, const model::OpenedModel& model, const CalibrationWindows& windows,
                       const CalibrationOptions& options, std::vector<int> owners, int together)
    : ranks_(ranks),
      config_(model.config),
      gram_(options.gram),
      walkers_(static_cast<int>(std::min<int64_t>(ranks.size(), windows.samples))),
      owners_(std::move(owners)) {
  if (options.gpu != nullptr && !options.pairs) {
    if (ranks.size() > 1) exchange_ = std::make_unique<ExchangeCuda>(ranks, *options.gpu);
    turns_.emplace(owners_, ranks.size());
    if (turns_->takes_part(ranks.rank())) calibration_.emplace(model, windows, options);
    return;
  }
  if (ranks.rank() < walkers_) calibration_.emplace(model, part_of(windows, ranks.rank(), walkers_), options);
  std::vector<int64_t> wanted;
  for (size_t layer = 0; layer < owners_.size(); ++layer) {
    if (owners_[layer] >= 0) wanted.push_back(static_cast<int64_t>(layer));
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t round = i / static_cast<size_t>(together);
    const size_t last = std::min(wanted.size(), (round + 1) * static_cast<size_t>(together)) - 1;
    until_[wanted[i]] = last_step(wanted[last]);
  }
  if (!wanted.empty()) steps_ = last_step(wanted.back()) + 1;
}

LayerStatistics SharedWalk::next(int64_t layer, bool keep_gram) {
  if (turns_) return next_turn(layer, keep_gram);
  while (step_ <= until_.at(layer)) step(keep_gram);
  return std::move(complete_.extract(layer).mapped());
}

void SharedWalk::finish() {
  while (step_ < steps_) step(false);
  while (turns_ && round_ < turns_->rounds()) take_turn(false);
  exchange_.reset();  // ranks leave together, before one waits for another's messages
}

LayerStatistics SharedWalk::next_turn(int64_t layer, bool keep_gram) {
  while (round_ <= turns_->round_of(layer)) take_turn(keep_gram);
  const int runner = turns_->runner(layer);
  if (runner == ranks_.rank()) return std::move(complete_.extract(layer).mapped());
  return unpacked(ranks_.receive(runner), model::input_groups(config_, layer), gram_);
}

void SharedWalk::take_turn(bool keep_gram) {
  const auto turn = turns_->turn(round_++, ranks_.rank());
  if (!turn) return;
  const int owner = turn->layer ? owners_[static_cast<size_t>(*turn->layer)] : -1;
  auto sums = calibration_->take_turn(*turn, exchange_.get(), keep_gram && owner == ranks_.rank());
  if (owner < 0) return;
  if (owner == ranks_.rank()) {
    complete_[*turn->layer] = std::move(sums);
  } else {
    ranks_.send(owner, packed(sums));
  }
}

void SharedWalk::step(bool keep_gram) {
  const int64_t mine = step_ - ranks_.rank(), complete = step_ - (walkers_ - 1);
  if (calibration_ && mine >= 0 && last_step(mine) < steps_) decode(mine, keep_gram);
  const bool delivered = complete >= 0 && owners_[static_cast<size_t>(complete)] == ranks_.rank();
  if (delivered && !complete_.contains(complete)) {
    complete_[complete] = unpacked(ranks_.receive(walkers_ - 1), model::input_groups(config_, complete), gram_);
  }
  ++step_;
}

/// This rank's windows, with the sums of those before them.
void SharedWalk::decode(int64_t layer, bool keep_gram) {
  const int rank = ranks_.rank(), last = walkers_ - 1;
  LayerStatistics before;
  if (rank > 0) before = unpacked(ranks_.receive(rank - 1), model::input_groups(config_, layer), gram_);
  auto sums = calibration_->next(keep_gram, std::move(before));
  const int owner = owners_[static_cast<size_t>(layer)];
  if (rank < last) {
    ranks_.send(rank + 1, packed(sums));
  } else if (owner == rank) {
    complete_[layer] = std::move(sums);
  } else if (owner >= 0) {
    ranks_.send(owner, packed(sums));
  }
}

}  // namespace w4q::pipeline
