// The hidden states of all windows between two layers of a walk on a GPU: in its memory as far as that goes, in the
// host's beyond. Windows go through a layer in chunks, and what a chunk is does not depend on where it lies: products
// have other last bits with other numbers of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/buffer.h"
#include "device/stream.h"
#include "pipeline/hidden_states.h"

namespace w4q::pipeline {

class WindowChunks {
 public:
  struct Shape {
    int64_t windows = 0;
    int64_t chunk = 1;   ///< windows of a chunk; the last may have fewer
    int64_t values = 0;  ///< fp32 of a window
  };

  /// The first `resident` windows, whole chunks or all, stay on the stream's GPU. The stream must outlive it.
  WindowChunks(const Shape& shape, int64_t resident, const device::Stream& stream);

  int64_t count() const noexcept { return (shape_.windows + shape_.chunk - 1) / shape_.chunk; }
  int64_t resident() const noexcept { return resident_; }
  int64_t windows(int64_t chunk) const noexcept {
    return std::min(shape_.chunk, shape_.windows - chunk * shape_.chunk);
  }
  size_t bytes(int64_t chunk) const noexcept {
    return static_cast<size_t>(windows(chunk) * shape_.values) * sizeof(float);
  }

  /// A window that stays on the GPU.
  float* window(int64_t index) noexcept { return states_.as<float>() + index * shape_.values; }
  /// A chunk on the GPU, to work on: where it stays, or a copy of what `others` have, until the next load.
  float* load(int64_t chunk, HiddenStates& others);
  /// Keeps what `from`, in GPU memory, holds for it. Waits for what is queued where that leaves the GPU.
  void store(int64_t chunk, const float* from, HiddenStates& others);

 private:
  bool stays(int64_t chunk) const noexcept { return chunk * shape_.chunk < resident_; }

  const Shape shape_;
  const int64_t resident_;
  const device::Stream& stream_;
  device::DeviceBuffer states_;  // [resident, values]
  device::DeviceBuffer loaded_;  // one chunk of the others
};

}  // namespace w4q::pipeline
