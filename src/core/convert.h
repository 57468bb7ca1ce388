// Fast conversion of arrays between the weight types and fp32; equal to core/float_formats.h value by value on every
// instruction set (class E0, tests/core/convert_test.cpp). Sources and destinations need no alignment.
#pragma once

#include <cstddef>
#include <span>

#include "core/dtype.h"

namespace w4q {

/// Widens `out.size()` elements of type `dtype` (f32, f16 or bf16) that start at `bytes`. Signalling NaNs become quiet.
/// Throws internal when `bytes` is too short or the type is another.
void widen(std::span<const std::byte> bytes, DType dtype, std::span<float> out);

/// Rounds `values` to `dtype` (f32, f16 or bf16; nearest even) into `bytes`, which must be exactly as long.
void narrow(std::span<const float> values, DType dtype, std::span<std::byte> bytes);

}  // namespace w4q
