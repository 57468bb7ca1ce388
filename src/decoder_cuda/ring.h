// The way of weights to the GPU: a ring of page-locked memory that many threads fill out of a file's mapping while the
// GPU fetches what has been filled before.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "device/buffer.h"
#include "device/stream.h"

namespace w4q::decoder_cuda {

/// One for all of a load; it takes its memory when the first bytes come. The stream must outlive it.
class UploadRing {
 public:
  explicit UploadRing(const device::Stream& stream) : stream_(stream) {}
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  const device::Stream& stream() const noexcept { return stream_; }
  /// Queues a copy; `from` may go when this returns.
  void copy(std::byte* to, std::span<const std::byte> from);
  /// A copy in GPU memory of its own, which is under way.
  device::DeviceBuffer copy_of(std::span<const std::byte> from);

  /// GPU memory of at least so many bytes, for work that is queued before this is called again.
  std::byte* scratch(size_t bytes);
  /// A number that is all ones, and that kernels may lower; finish() hands it to `look` where they did.
  unsigned long long* watch(std::function<void(unsigned long long)> look);
  /// Waits until everything is in its place, and looks at what was watched.
  void finish();

 private:
  static constexpr size_t slots = 4;
  static constexpr size_t slot_bytes = size_t{8} << 20;

  void next_slot();

  const device::Stream& stream_;
  device::PinnedBuffer memory_;
  std::array<device::Event, slots> fetched_;  ///< recorded where the GPU is done with a slot
  size_t slot_ = 0, used_ = 0;
  device::DeviceBuffer scratch_;
  device::DeviceBuffer watched_;
  std::vector<std::function<void(unsigned long long)>> looks_;
};

}  // namespace w4q::decoder_cuda
