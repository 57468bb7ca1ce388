// Decodes rows of packed weights (canonical layout) to fp32 fast: equal to the scheme's reference decoder bit for bit
// on every instruction set (class E1: one table value times one scale, rounded once).
#pragma once

#include <cstdint>
#include <span>

#include "core/views.h"
#include "formats/packed.h"

namespace w4q::kernels {

/// Rows [begin, begin + out.rows) of a canonical weight into `out`, out.cols = k. Bytes read per weight: bits/8 + one
/// scale per block. Throws internal when the rows do not exist or the layout is another.
void dequantize_rows(const formats::PackedWeight& weight, int64_t begin, MatrixView<float> out);

/// The sum of passes that take the same input, added in fp32 in their order.
void dequantize_rows(std::span<const formats::PackedWeight> passes, int64_t begin, MatrixView<float> out);

/// What a linear computes with but for its input scale: the sum of its passes, rotations undone.
void dequantize_rows(const formats::PackedLinear& linear, int64_t begin, MatrixView<float> out);

}  // namespace w4q::kernels
