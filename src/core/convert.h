// Fast conversion of arrays between the weight types and fp32; equal to core/float_formats.h value by value on every
// instruction set (class E0, tests/core/convert_test.cpp). Sources and destinations need no alignment.
// Small floats with scales become fp32 here too; nothing rounds to them.
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

/// One row of OCP E4M3 codes with a scale for every `block` of them, the last of which may be shorter:
/// out[i] = value(codes[i]) · scales[i / block], rounded once. Throws internal where there are too few codes or scales.
void widen_e4m3(std::span<const std::byte> codes, std::span<const float> scales, size_t block, std::span<float> out);

/// The same of OCP E2M1, two codes a byte, the low nibble first. `block` and the length of `out` are even.
void widen_e2m1(std::span<const std::byte> codes, std::span<const float> scales, size_t block, std::span<float> out);

}  // namespace w4q
