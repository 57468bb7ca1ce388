// GPU memory that goes round on one stream: what is given back is taken again by what is queued there later. Freeing
// memory waits for everything that runs on the GPU, on all streams; this waits for nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "device/context.h"

namespace w4q::device {

/// Of one stream's GPU. By any thread; whoever gives memory back has queued its last use on the stream, or has waited for
/// it.
class Spares {
 public:
  explicit Spares(const Context& context) noexcept : gpu_(context.ordinal()) {}
  ~Spares() { free_all(); }
  Spares(const Spares&) = delete;
  Spares& operator=(const Spares&) = delete;

  /// Memory of this size, aligned to 256; not initialised. Throws device when there is none, naming the size.
  std::byte* take(size_t size);
  void give(std::byte* data, size_t size) noexcept;
  /// Frees what nobody has.
  void free_all() noexcept;
  /// Bytes that nobody has.
  int64_t bytes() const noexcept;

 private:
  std::byte* find(size_t size) noexcept;

  int gpu_;
  mutable std::mutex mutex_;
  std::multimap<size_t, std::byte*> blocks_;
  size_t bytes_ = 0;
};

}  // namespace w4q::device
