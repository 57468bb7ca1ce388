// Streams whose work goes first, or last, where a GPU has more than it holds at once.
#pragma once

#include "device/stream.h"

namespace w4q::device {

class RankedStream {
 public:
  /// Rank 0 goes before 1, and so on, as far as the GPU tells them apart. The context must outlive it.
  RankedStream(Context& context, int rank);
  ~RankedStream();
  RankedStream(const RankedStream&) = delete;
  RankedStream& operator=(const RankedStream&) = delete;

  /// Must not outlive this.
  Stream view() const noexcept { return {context_, stream_}; }

 private:
  Context& context_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace w4q::device
