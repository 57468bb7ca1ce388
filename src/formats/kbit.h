// kbit: blocks of 32 weights along k share a scale; codes of 2..5 bits index a table; bit p of a block's codes is word
// p. Canonical planes: codes I32 [n, ceil(k/32), bits] (bit i of word p = bit p of the code of weight i), scales U8
// (E4M4) or F16 [n, ceil(k/32)], codebook F32 [2^bits]. A ragged tail is padded with zero code bits (docs/kbit.md).
#pragma once

#include <cstdint>
#include <span>

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

/// Encodes a block's absmax: the scale's bits (E4M4 byte or f16) and its decoded value. `table_max` is the table's
/// largest magnitude, a power of two times 1.
struct EncodedScale {
  uint16_t bits = 0;
  float value = 0;
  bool saturated = false;
};
EncodedScale kbit_encode_scale(float absmax, float table_max, ScaleType type) noexcept;
float kbit_decode_scale(uint16_t bits, ScaleType type) noexcept;

/// The exponent e of the factor 2^e that brings block maxima in [smallest, largest] (non-zero ones) into the normal
/// range of the scale type: 0 when they already are, otherwise the least e that keeps `largest` representable.
int kbit_range_exponent(float smallest, float largest, ScaleType type) noexcept;

/// The registry row.
extern const SchemeRow kbit_row;

}  // namespace w4q::formats
