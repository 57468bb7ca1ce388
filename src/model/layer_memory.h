// What layers remember of a sequence: keys and values of every position, or the state of a delta net.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "model/config.h"
#include "model/scratch.h"

namespace w4q::model {

/// One layer's. A layer that reads another one's keys and values has that one's cache.
struct LayerMemory {
  kernels::KeyValueCache cache;
  kernels::DeltaMemory delta;
};

/// Throws unsupported where layers cannot be run one after the other over all of a text, each forgotten when it is done:
/// they read another one's keys, or embeddings of their own. `what` does so: "calibration".
void require_layer_by_layer(const ModelConfig& config, std::string_view what);

/// Those of all layers, or of one at a time, for sequences of up to `capacity` positions.
class LayerMemories {
 public:
  /// Throws bad_argument when the capacity is not positive or what it takes is larger than memory can be.
  LayerMemories(const ModelConfig& config, int64_t capacity);
  /// One after the other in the same memory: for layers that do not share keys.
  static LayerMemories one_at_a_time(const ModelConfig& config, int64_t capacity);

  LayerMemory layer(int64_t index);

 private:
  struct OneAtATime {};
  LayerMemories(const ModelConfig& config, int64_t capacity, OneAtATime);
  struct Planes {
    Floats keys, values, history, state;
  };

  const ModelConfig* config_;
  int64_t capacity_;
  std::vector<Planes> planes_;  ///< one for all layers, or each layer's
};

/// What is kept of several sequences that go through the layers together, each layer over all of them before the next:
/// one layer's memory at a time, and of every sequence the keys and values that later layers read.
class WalkMemories {
 public:
  WalkMemories(const ModelConfig& config, int64_t sequences, int64_t capacity);

  LayerMemory layer(int64_t index, int64_t sequence);
  /// Exchanges the keys and values that layers from `first` on keep for later ones. Both are of one model.
  void swap_from(int64_t first, WalkMemories& other) noexcept;
  /// Of keys and values that later layers read.
  static int64_t kept_bytes(const ModelConfig& config, int64_t sequences, int64_t capacity);

 private:
  struct Kept {
    int64_t layer;
    std::vector<Floats> keys, values;  ///< of each sequence
  };

  const ModelConfig* config_;
  int64_t capacity_;
  std::vector<Kept> kept_;
  LayerMemories others_;
};

}  // namespace w4q::model
