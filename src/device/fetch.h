// The way of large arrays from the GPU: pieces by page-locked memory, which many threads empty. Memory that nobody has
// touched yet costs its page faults in all of them instead of in one.
#pragma once

#include <cstddef>
#include <span>

#include "device/buffer.h"
#include "device/stream.h"

namespace w4q::device {

class Fetch {
 public:
  /// The stream must outlive it.
  explicit Fetch(const Stream& stream) : stream_(stream) {}

  /// Copies behind what is queued, and waits.
  void operator()(const void* from, std::span<std::byte> to);

 private:
  const Stream& stream_;
  PinnedBuffer piece_;  ///< made when it is first needed
};

}  // namespace w4q::device
