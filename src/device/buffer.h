// Memory of the GPU, and pinned memory of the host for copies that overlap.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "device/stream.h"

namespace w4q::device {

/// Bytes in the memory of a GPU, aligned to 256. Not initialised. Freed there, whichever GPU is current.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Throws device when the memory is not there, naming the size.
  DeviceBuffer(const Context& context, size_t size);
  /// The same for use in the order of a stream: where that keeps spares, from these, and given back to them. What uses it
  /// on another stream is done before it goes.
  DeviceBuffer(const Stream& stream, size_t size);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : gpu_(other.gpu_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        spares_(std::move(other.spares_)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(spares_, other.spares_);
    return *this;
  }
  /// A copy of host bytes on the stream's GPU, for use in the order of the stream.
  static DeviceBuffer copy_of(std::span<const std::byte> bytes, const Stream& stream);

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  template <class T>
  T* as() noexcept {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  const T* as() const noexcept {
    return reinterpret_cast<const T*>(data_);
  }
  size_t size() const noexcept { return size_; }
  /// The ordinal of the GPU.
  int gpu() const noexcept { return gpu_; }

  /// Asynchronous copies; the host bytes must stay until the stream is synchronised. Sizes are checked.
  void upload(std::span<const std::byte> bytes, const Stream& stream);
  void download(std::span<std::byte> bytes, const Stream& stream) const;
  /// Fills all bytes with `value`.
  void fill(int value, const Stream& stream);

 private:
  int gpu_ = 0;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::shared_ptr<Spares> spares_;  ///< where the memory goes back to; null: it is freed
};

/// Page-locked host memory, which the context's GPU may write too.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(const Context& context, size_t size);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : gpu_(other.gpu_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  std::span<std::byte> bytes() noexcept { return {data_, size_}; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  int gpu_ = 0;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace w4q::device
