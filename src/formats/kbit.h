// kbit: blocks of 32 weights along k share a scale; codes of 2..5 bits index a table; bit p of a block's codes is word
// p. Canonical planes: codes I32 [n, ceil(k/32), bits] (bit i of word p = bit p of the code of weight i), scales U8
// (E4M4) or F16 [n, ceil(k/32)], codebook F32 [2^bits]. A ragged tail is padded with zero code bits (docs/kbit.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/scale_codec.h"
#include "formats/table/table_format.h"

namespace w4q::formats {

inline constexpr int kbit_block = 32;

/// Midpoints of neighbouring table entries, fp32: 2^bits − 1 of them. A value above midpoint i has a code above i; a
/// tie goes to the lower code.
void kbit_midpoints(std::span<const float> codebook, std::span<float> midpoints) noexcept;

/// The code of x: how many midpoints are below it.
inline int kbit_code(float x, std::span<const float> midpoints) noexcept {
  int code = 0;
  for (const float midpoint : midpoints) code += x > midpoint ? 1 : 0;
  return code;
}

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
/// Blocks in a row of k.
inline int64_t kbit_blocks(int64_t k) noexcept { return (k + kbit_block - 1) / kbit_block; }

/// The registry row.
SchemeRow kbit_row();

}  // namespace w4q::formats
