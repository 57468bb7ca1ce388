// Residual passes that stay in page-locked host memory and come to the GPU for each product (docs/rotated.md): a stream
// of their own brings as many of the next ones as a ring of GPU memory holds while others are multiplied with.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "device/buffer.h"
#include "device/stream.h"

namespace w4q::decoder_cuda {

/// What a pass in host memory weighs and is worth.
struct OffloadCandidate {
  int64_t bytes = 0;
  double error = 0;  ///< energy of the pass over that of the first: what is missing without it
};

/// A pass in host memory.
struct OffloadedPass {
  device::PinnedBuffer bytes;  ///< codes, then norms
  size_t norms_at = 0;
  double error = 0;  ///< OffloadCandidate::error
};

/// Which candidates stay in GPU memory within `budget` bytes: the most error for a byte first.
std::vector<bool> choose_resident(std::span<const OffloadCandidate> candidates, int64_t budget);

/// What was moved since the last reset().
struct OffloadTraffic {
  int64_t copies = 0, bytes = 0;
  double copy_seconds = 0;  ///< of the copy stream at work
  double wait_seconds = 0;  ///< that products waited for it
  /// Share of the copying that other work hid.
  double overlap() const noexcept { return copy_seconds > 0 ? 1 - wait_seconds / copy_seconds : 1; }
};

class CudaOffload {
 public:
  /// Passes in the order in which a step needs them; they must outlive it.
  CudaOffload(std::span<const OffloadedPass* const> passes, const device::Stream& stream);
  ~CudaOffload();

  /// Makes `stream` wait until pass `index` is there; a pointer to its bytes. release() after its use has been queued,
  /// and before the next acquire(). Passes between the one released last and this one are skipped.
  const std::byte* acquire(size_t index);
  /// Its place may be filled again once the work so far is done.
  void release(size_t index);

  /// Of all passes together.
  int64_t round_bytes() const noexcept;
  /// GPU memory of the ring: twice the largest pass.
  int64_t device_bytes() const noexcept { return static_cast<int64_t>(ring_.size()); }
  /// With `skip`, passes are zeros and nothing is copied: for measuring what is computed beside the copies. Waits.
  void skip_copies(bool skip);
  /// Lets every copy start this much later: for tests of the order of things.
  void delay_copies(std::chrono::microseconds delay) noexcept { delay_ = delay; }
  /// Waits, and sums up.
  OffloadTraffic traffic();
  void reset_traffic();

 private:
  /// A pass in the ring, or on its way there.
  struct Held {
    size_t index, at, size;
    device::Event filled;
  };
  struct Span {
    device::Event begin, end;
  };

  /// Where `size` bytes fit behind what is held, or nothing.
  std::optional<size_t> place(size_t size) const;
  /// Copies passes behind what is held, or from `index` on where that is nothing, as far as they fit.
  void fetch(size_t index);
  void fetch_to(size_t at, size_t index);
  /// Adds up the older half of the times.
  void shorten(std::deque<Span>& spans, double& seconds, size_t keep);

  std::vector<const OffloadedPass*> passes_;
  const device::Stream& stream_;
  device::Stream copies_;
  device::DeviceBuffer ring_;
  std::deque<Held> held_;  ///< in the order in which they are needed, and in which they stand in the ring
  device::Event used_;     ///< the last release: what is held no more may be overwritten from there on
  bool skips_ = false;
  std::chrono::microseconds delay_{0};
  std::deque<Span> copying_, waiting_;
  OffloadTraffic traffic_;
};

}  // namespace w4q::decoder_cuda
