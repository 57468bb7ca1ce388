// The matrix that a quantizer reads: f32, f16 or bf16, row-major, checked once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/views.h"

namespace w4q::quantize {

/// Throws unsupported for another type or shape, bad_argument when the bytes do not fit the shape.
void check_weight(const TensorView& weight);

/// Rows of a parallel task: enough weights to hide its start.
inline int64_t row_grain(int64_t k) noexcept { return std::max<int64_t>(1, (1 << 16) / k); }

/// The bytes of one row of a matrix of weights.
inline std::span<const std::byte> row_bytes(const TensorView& weight, int64_t row) {
  const auto bytes = static_cast<size_t>(weight.shape[1] * dtype_bits(weight.dtype) / 8);
  return weight.bytes.subspan(static_cast<size_t>(row) * bytes, bytes);
}

/// Throws bad_file naming `row` and the column of the first NaN or infinity among `bytes`, the values of that row.
[[noreturn]] void refuse_non_finite(std::string_view name, DType dtype, std::span<const std::byte> bytes, int64_t row);

}  // namespace w4q::quantize
