// A model that several processes hold together: each has a stretch of its layers, and hidden states go from one to the
// next. What a process computes is what one with all layers would, so every result is the same.
#pragma once

#include <cstdint>
#include <vector>

#include "core/views.h"
#include "model/opened.h"
#include "ranks/ranks.h"

namespace w4q::model {

/// Layers first … end − 1.
struct LayerRange {
  int64_t first = 0, end = 0;

  bool operator==(const LayerRange&) const = default;
  int64_t count() const noexcept { return end - first; }
};

/// Bytes that the layers of a model are stored in, each; embeddings count to the first one, the head to the last.
std::vector<int64_t> stored_layer_bytes(const OpenedModel& model);

/// Cuts layers of these bytes into `parts` stretches, each of at least one, so that the largest has as few bytes as can
/// be. Of equal ways the one that is cut earliest.
std::vector<LayerRange> cut_layers(const std::vector<int64_t>& bytes, int parts);

/// Whether the layers of a model can be held by several: not where they know of one another.
bool can_be_split(const ModelConfig& config);

/// cut_layers of a model. Throws bad_argument where it has fewer layers than parts, unsupported where layers know of one
/// another.
std::vector<LayerRange> split_layers(const OpenedModel& model, int parts);

/// The config of these layers by themselves.
ModelConfig config_of(const ModelConfig& whole, const LayerRange& layers);

/// The place of this process among those that hold a model together. Ranks stand in groups of neighbours, each of which
/// holds the model once.
class LayerStage {
 public:
  /// One process that holds all layers.
  LayerStage() = default;
  /// `split` ranks hold the model; their number divides that of all ranks.
  LayerStage(ranks::Ranks& ranks, int split);

  int index() const noexcept { return index_; }
  int count() const noexcept { return count_; }  ///< of stages
  int group() const noexcept { return group_; }
  int groups() const noexcept { return groups_; }
  bool first() const noexcept { return index_ == 0; }
  bool last() const noexcept { return index_ + 1 == count_; }
  /// The rank of the last stage of a group.
  int last_rank(int group) const noexcept { return (group + 1) * count_ - 1; }

  /// Hidden states from the stage before, and to the one behind. Throws Stopped and Interrupted, as all calls of ranks.
  void receive(MatrixView<float> hidden) const;
  void send(MatrixView<const float> hidden) const;
  /// What the last stage gives, at all stages of the group.
  int32_t share(int32_t token) const;

 private:
  ranks::Ranks* ranks_ = nullptr;
  int index_ = 0, count_ = 1, group_ = 0, groups_ = 1;
};

}  // namespace w4q::model
