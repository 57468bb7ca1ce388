// The way of large arrays to the GPU: pieces of page-locked memory, which many threads fill while the GPU fetches those
// filled before. What is not page-locked a driver copies in one thread. The other way: device/fetch.h.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "device/buffer.h"
#include "device/stream.h"

namespace w4q::device {

class Send {
 public:
  /// The stream must outlive it.
  explicit Send(const Stream& stream) : stream_(stream) {}
  ~Send();
  Send(const Send&) = delete;
  Send& operator=(const Send&) = delete;

  /// Queues a copy behind what is queued; `from` may go when this returns.
  void operator()(void* to, std::span<const std::byte> from);

 private:
  static constexpr size_t pieces = 2;

  const Stream& stream_;
  PinnedBuffer memory_;                ///< made when it is first needed
  std::array<Event, pieces> fetched_;  ///< recorded where the GPU is done with a piece
  size_t next_ = 0;
};

}  // namespace w4q::device
