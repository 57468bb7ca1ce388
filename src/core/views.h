// Views that never own; core/buffer.h has the one owning byte buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/dtype.h"

namespace w4q {

/// Dimensions of a dense, row-major tensor. Rank 0 is one element.
using Shape = std::vector<int64_t>;

/// Product of the dimensions. The shape has been validated: no overflow is checked. (Unsigned, because dimensions
/// before a zero may be of any size.)
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

/// The bytes of an array of trivially copyable values.
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) noexcept {
  return std::as_bytes(std::span<const T>(values));
}

/// std::ranges::equal compares bytes one at a time.
inline bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace w4q
