// Views that never own, and the one owning byte buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace w4q {

/// Dimensions of a dense, row-major tensor. Rank 0 is one element.
using Shape = std::vector<int64_t>;

/// Product of the dimensions. The shape has been validated: no overflow is checked. (Unsigned, because dimensions before
/// a zero may be of any size.)
inline int64_t element_count(const Shape& shape) noexcept {
  uint64_t count = 1;
  for (int64_t dim : shape) count *= static_cast<uint64_t>(dim);
  return static_cast<int64_t>(count);
}

/// Bytes of a dense tensor; sub-byte types are packed without gaps.
inline int64_t byte_count(DType dtype, const Shape& shape) noexcept {
  return element_count(shape) * dtype_bits(dtype) / 8;
}

/// A named tensor in somebody else's memory. `bytes` may be unaligned for its type: read it through core/convert.h or
/// memcpy.
struct TensorView {
  std::string_view name;
  DType dtype = DType::u8;
  Shape shape;
  std::span<const std::byte> bytes;
};

/// n rows (outputs) × k columns (inputs), row-major, `stride` elements from row to row.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  MatrixView() = default;
  MatrixView(T* data_, int64_t rows_, int64_t cols_) : MatrixView(data_, rows_, cols_, cols_) {}
  MatrixView(T* data_, int64_t rows_, int64_t cols_, int64_t stride_)
      : data(data_), rows(rows_), cols(cols_), stride(stride_) {}
  operator MatrixView<const T>() const {
    return {data, rows, cols, stride};
  }  // NOLINT: a view of const is the same view

  T* row(int64_t r) const noexcept { return data + r * stride; }
};

/// Bytes on the heap, aligned to 64, zero-initialised. Copies are explicit through clone().
class Buffer {
 public:
  static constexpr size_t alignment = 64;

  Buffer() = default;
  explicit Buffer(size_t size) : data_(allocate(size)), size_(size) {
    if (size != 0) std::memset(data_.get(), 0, size);
  }
  static Buffer copy_of(std::span<const std::byte> bytes) {
    Buffer result(bytes.size());
    if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  Buffer(Buffer&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  Buffer clone() const { return copy_of(bytes()); }

  std::byte* data() noexcept { return data_.get(); }
  const std::byte* data() const noexcept { return data_.get(); }
  size_t size() const noexcept { return size_; }
  std::span<std::byte> bytes() noexcept { return {data_.get(), size_}; }
  std::span<const std::byte> bytes() const noexcept { return {data_.get(), size_}; }

  /// The buffer as an array of T; size() is a multiple of sizeof(T) or the rest is left out.
  template <class T>
  std::span<T> as() noexcept {
    return {reinterpret_cast<T*>(data_.get()), size_ / sizeof(T)};
  }
  template <class T>
  std::span<const T> as() const noexcept {
    return {reinterpret_cast<const T*>(data_.get()), size_ / sizeof(T)};
  }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept { ::operator delete[](data, std::align_val_t(alignment)); }
  };
  static std::byte* allocate(size_t size) {
    return size == 0 ? nullptr : static_cast<std::byte*>(::operator new[](size, std::align_val_t(alignment)));
  }

  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

/// The bytes of an array of trivially copyable values.
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) noexcept {
  return std::as_bytes(std::span<const T>(values));
}

}  // namespace w4q
