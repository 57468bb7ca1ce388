// The integer family: value = (code − zero) · scale, codes of 2 to 8 bits; the scale, and with an asymmetric
// scheme the zero, belong to a group of inputs of one output (docs/int.md).
//
// Canonical planes, G = groups of a row:
//   codes        I32 [n, ceil(k·bits/32)]  per output a dense stream (bit_stream.h) along k; unused top bits are zero
//   scales       F16, BF16 or F32 [n, G]   finite; a sign is legal
//   zeros        U8 [n, G]                 asymmetric only; otherwise every zero is 2^(bits−1)
//   group_index  I32 [k]                   act order only: the group of every input; otherwise k div group size
//
// Decoding widens the scale to fp32, subtracts (exact) and multiplies (one rounding).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "formats/bit_stream.h"
#include "formats/packed.h"
#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

/// The widths that the family has.
constexpr bool is_integer_bits(int bits) noexcept { return bits >= 2 && bits <= 8; }
/// The zero of every group of a symmetric scheme.
constexpr int integer_symmetric_zero(int bits) noexcept { return 1 << (bits - 1); }
/// The largest zero that a plane may hold: 2^bits, one more than a code, because GPTQ's older files can say that; 255
/// with 8 bits, where a byte ends. Encoders stay below 2^bits.
constexpr int integer_largest_zero(int bits) noexcept { return bits == 8 ? 255 : 1 << bits; }

/// Inputs of a full group; the last one of a row may have fewer.
inline int64_t integer_group_size(const Scheme& scheme, int64_t k) noexcept {
  return scheme.block == whole_row ? k : scheme.block;
}
inline int64_t integer_groups(const Scheme& scheme, int64_t k) noexcept {
  const int64_t size = integer_group_size(scheme, k);
  return (k + size - 1) / size;
}

/// The largest magnitude of a scale: finite in its type, and so are all its products in fp32.
float integer_scale_max(const Scheme& scheme) noexcept;

/// The canonical planes. Throws unsupported when n or k is out of range.
std::vector<PlaneSpec> integer_planes(const Scheme& scheme, int64_t n, int64_t k);
/// Zeroed canonical planes; with act order, group_index as k div group size.
PackedWeight allocate_integer(const Scheme& scheme, int64_t n, int64_t k);
/// SchemeRow::validate and largest_scale.
void integer_validate(const PackedWeight& canonical, std::string_view name);
std::optional<float> integer_largest_scale(const PackedWeight& packed, std::string_view name);

/// One row of a canonical weight: k codes.
void integer_read_codes(const PackedWeight& canonical, int64_t row, std::span<uint8_t> codes);
void integer_write_codes(PackedWeight& canonical, int64_t row, std::span<const uint8_t> codes);
/// One row's scales widened to fp32, one per group.
void integer_read_scales(const PackedWeight& canonical, int64_t row, std::span<float> scales);
/// One row's zeros, one per group, whether the scheme stores them or not.
void integer_read_zeros(const PackedWeight& canonical, int64_t row, std::span<uint8_t> zeros);

/// A group's scale as stored, and its zero.
struct IntegerScale {
  float value = 0;         ///< decoded
  uint32_t bits = 0;       ///< as stored: f16, bf16 or f32
  int zero = 0;            ///< below 2^bits
  bool saturated = false;  ///< the group needs a larger scale than the type has
};

/// `scale` rounded to the scheme's type, never to zero (a scale of zero is refused by many readers) and never above
/// integer_scale_max. `scale` is positive.
IntegerScale integer_store_scale(const Scheme& scheme, double scale) noexcept;

/// The rule of min and max, for a group whose values lie in [low, high]: symmetric, the scale is the largest magnitude
/// over (2^bits − 1)/2; asymmetric, the range widened to hold 0 over 2^bits − 1 and the zero the nearest integer to
/// −low/scale, ties to even. A group of zeros gets scale 1 and the symmetric zero.
IntegerScale integer_scale(const Scheme& scheme, float low, float high) noexcept;

/// The nearest code, ties to even. `scale` is not zero.
inline uint8_t integer_code(float x, float scale, int zero, int bits) noexcept {
  const auto lowest = static_cast<float>(-zero);
  const auto highest = static_cast<float>((1 << bits) - 1 - zero);
  float steps = x / scale;
  steps = steps < lowest ? lowest : steps;
  steps = steps > highest ? highest : steps;
  // Adding and taking away 1.5 · 2^23 rounds to an integer, half to even.
  constexpr float rounder = 0x1.8p23f;
  return static_cast<uint8_t>(static_cast<int>((steps + rounder) - rounder) + zero);
}

/// The registry row.
SchemeRow integer_row();

}  // namespace w4q::formats
