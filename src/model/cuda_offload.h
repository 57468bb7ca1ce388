// Residual passes that stay in page-locked host memory and come to the GPU for each product (docs/rotated.md): two
// buffers in GPU memory take turns, a stream of their own fills the one while the other is multiplied with.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "device/buffer.h"
#include "device/stream.h"

namespace w4q::model {

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

  /// Makes `stream` wait until pass `index` is there; a pointer to its bytes. release() after its use has been queued.
  const std::byte* acquire(size_t index);
  /// Its buffer may be filled again once the work so far is done; the pass after the next is on its way then.
  void release(size_t index);

  /// Of all passes together.
  int64_t round_bytes() const noexcept;
  /// GPU memory of the two buffers.
  int64_t device_bytes() const noexcept { return static_cast<int64_t>(2 * slot_bytes_); }
  /// Lets every copy start this much later: for tests of the order of things.
  void delay_copies(std::chrono::microseconds delay) noexcept { delay_ = delay; }
  /// Waits, and sums up.
  OffloadTraffic traffic();
  void reset_traffic();

 private:
  struct Slot {
    device::DeviceBuffer buffer;
    device::Event filled, used;
    size_t holds = SIZE_MAX;
  };
  struct Timed {
    device::Event copy_begin, copy_end;
  };
  struct Wait {
    device::Event begin, end;
  };

  void fetch(size_t index);

  std::vector<const OffloadedPass*> passes_;
  const device::Stream& stream_;
  device::Stream copies_;
  size_t slot_bytes_ = 0;
  std::array<Slot, 2> slots_;
  std::chrono::microseconds delay_{0};
  size_t turn_ = 0;  ///< the buffer that is filled next
  std::vector<Timed> timed_;
  std::vector<Wait> waits_;
  OffloadTraffic traffic_;
};

}  // namespace w4q::model
