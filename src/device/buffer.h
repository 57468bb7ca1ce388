// Memory of the GPU, and pinned memory of the host for copies that overlap.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "device/stream.h"

namespace w4q::device {

/// Bytes in GPU memory, aligned to 256. Not initialised.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Throws device when the memory is not there, naming the size.
  explicit DeviceBuffer(size_t size);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  /// A copy of host bytes.
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

  /// Asynchronous copies; the host bytes must stay until the stream is synchronised. Sizes are checked.
  void upload(std::span<const std::byte> bytes, const Stream& stream);
  void download(std::span<std::byte> bytes, const Stream& stream) const;
  /// Fills all bytes with `value`.
  void fill(int value, const Stream& stream);

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Page-locked host memory.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t size);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  std::span<std::byte> bytes() noexcept { return {data_, size_}; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace w4q::device
