// kbit: blocks of 32 weights along k share a scale; codes of 2..5 bits index a table; bit p of a block's codes is word
// p. Canonical planes: codes I32 [n, ceil(k/32), bits] (bit i of word p = bit p of the code of weight i), scales U8
// (E4M4) or F16 [n, ceil(k/32)], codebook F32 [2^bits]. A ragged tail is padded with zero code bits (docs/kbit.md).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/float_formats.h"
#include "formats/e4m4.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

inline constexpr int kbit_block = 32;

/// Midpoints of neighbouring table entries, fp32: 2^bits − 1 of them. A value above midpoint i has a code above i.
void kbit_midpoints(std::span<const float> codebook, std::span<float> midpoints) noexcept;

/// The code of x: how many midpoints are below it. A tie goes to the lower code.
inline int kbit_code(float x, std::span<const float> midpoints) noexcept {
  int code = 0;
  for (float midpoint : midpoints) code += x > midpoint ? 1 : 0;
  return code;
}

/// Largest and smallest normal value of a scale type.
inline float kbit_scale_max(ScaleType type) noexcept { return type == ScaleType::e4m4 ? e4m4_max : 65504.0f; }
inline float kbit_scale_min_normal(ScaleType type) noexcept {
  return type == ScaleType::e4m4 ? e4m4_min_normal : 0x1p-14f;
}

inline float kbit_decode_scale(uint16_t bits, ScaleType type) noexcept {
  return type == ScaleType::e4m4 ? e4m4_decode(static_cast<uint8_t>(bits)) : f32_from_f16(bits);
}

/// Encodes a block's absmax: the scale's bits (E4M4 byte or f16) and its decoded value. `table_max` is the codebook's
/// largest magnitude. `saturated`: absmax / table_max would round to more than the largest scale.
struct EncodedScale {
  uint16_t bits = 0;
  float value = 0;
  bool saturated = false;
};
inline EncodedScale kbit_encode_scale(float absmax, float table_max, ScaleType type) noexcept {
  const float scale = absmax / table_max;
  if (type == ScaleType::e4m4) {
    const uint8_t code = e4m4_encode(scale);
    return {code, e4m4_decode(code), scale >= 31.5f};
  }
  constexpr uint16_t largest = 0x7BFF;
  const uint16_t half = f16_from_f32(scale);
  const bool saturated = half > largest;
  return {saturated ? largest : half, f32_from_f16(saturated ? largest : half), saturated};
}

/// The largest magnitude of a table.
float kbit_table_max(std::span<const float> codebook) noexcept;

/// The exponent e of the factor 2^e that brings block maxima in [smallest, largest] (non-zero ones) into the normal
/// range of the scale type: 0 when they already are, otherwise the least e that keeps `largest` representable, so that
/// `smallest` has the most room. Kept within the range where table entries stay normal and products finite in fp32.
int kbit_range_exponent(float smallest, float largest, ScaleType type) noexcept;
/// `table` · 2^exponent.
std::vector<float> kbit_scaled_codebook(std::span<const float> table, int exponent);

/// Mask of the lanes of block `block` that hold weights of a row of k: all ones but in a ragged tail.
inline uint32_t kbit_lane_mask(int64_t k, int64_t block) noexcept {
  const int64_t lanes = k - block * kbit_block;
  return lanes >= kbit_block ? ~0u : (1u << lanes) - 1;
}

/// Throws bad_file naming `name` unless the lanes behind the last weight of every row hold zero bits.
void kbit_check_padding(const PackedWeight& canonical, std::string_view name);
/// Checks the planes of a canonical weight (SchemeRow::validate).
void kbit_validate(const PackedWeight& canonical, std::string_view name);
/// Planes in the canonical layout (SchemeRow::planes).
std::vector<PlaneSpec> kbit_planes(const Scheme& scheme, int64_t n, int64_t k);
/// Blocks in a row of k.
inline int64_t kbit_blocks(int64_t k) noexcept { return (k + kbit_block - 1) / kbit_block; }

/// The registry row.
SchemeRow kbit_row();

}  // namespace w4q::formats
