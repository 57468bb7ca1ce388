// Small floats with scales: value = float(code) · (scale of its block [· factor of the tensor]), products rounded to fp32.
// The formats that servers call NVFP4, MXFP4, MXFP8 and FP8 (docs/floats.md).
//
//   nvfp4          E2M1, an E4M3 scale for 16 weights of a row, an f32 factor of the tensor
//   nvfp4-div      the same; what is stored is the factor's reciprocal, by which block scales are divided
//   mxfp4, mxfp8   E2M1 or E4M3, an E8M0 scale for 32 weights of a row
//   fp8-tensor, fp8-channel, fp8-block128[-f16 | -bf16 | -e8m0]
//                  E4M3, an f32 scale for the matrix, for a row, or for 128 × 128 weights
//
// Canonical planes are those of the table family; the codebook is always that of the float. Codes 0x7F and 0xFF, E4M3's
// NaN, stand for no weight.
#pragma once

#include <cstdint>
#include <span>

#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

/// What the codes of 4 or 8 bits mean. The last code of each sign of E4M3, its NaN, stands for the largest value here.
std::span<const float> small_float_table(int bits) noexcept;
/// The largest value: 6 or 448.
constexpr float small_float_largest(int bits) noexcept { return bits == 4 ? 6.0f : 448.0f; }
/// The nearest code, ties to even, beyond the largest value the largest; −0 keeps its sign.
uint8_t small_float_code(float x, int bits) noexcept;

/// Whether rows share scales: those of a tensor or of 128 × 128 weights.
bool shares_rows(const Scheme& scheme) noexcept;

/// The power of two that is the factor of a tensor with this largest magnitude: it brings the largest scale into
/// [112, 208], so that there is room for one twice as large, and every value is exact whether the factor or its reciprocal
/// is stored. 1 for 0.
float small_float_factor(float absmax) noexcept;

/// The scale of a block with this largest magnitude, relative to `factor`: never zero, 1 for a block of zeros.
/// E8M0: the smallest under which the block's maximum rounds to no more than the largest value, were there larger ones
/// (compressed-tensors' rule). f32: of 20 bits, so that every product with a code is exact. Others: absmax over the
/// largest value, rounded.
StoredScale small_float_scale(const Scheme& scheme, float absmax, float factor) noexcept;
/// The same of a scale: as the type stores it, not zero; f32 of 20 bits.
StoredScale positive_scale(float value, ScaleType type) noexcept;

/// The factor of the tensor that block scales are multiplied by, or 1; of nvfp4-div what they are divided by.
float tensor_factor(const PackedWeight& canonical);
/// The value of a scale that stands in the planes, the tensor's factor included.
float scale_with_factor(float scale, float factor, bool divides) noexcept;

/// The registry row.
SchemeRow small_float_row();

}  // namespace w4q::formats
