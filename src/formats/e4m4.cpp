#include "formats/e4m4.h"

#include <algorithm>
#include <bit>

namespace w4q::formats {
namespace {

constexpr int fp32_mantissa_bits = 23;
constexpr int mantissa_bits = 4;
constexpr uint32_t dropped_bits = fp32_mantissa_bits - mantissa_bits;
/// Exponent field of fp32 less that of E4M4 for the same value.
constexpr uint32_t rebias = 127 - 11;

/// `value` in [0, 17) to the nearest integer, ties to even, whatever the rounding mode.
uint32_t round_half_even(float value) noexcept {
  const auto whole = static_cast<uint32_t>(value);
  const float rest = value - static_cast<float>(whole);  // exact
  return whole + (rest > 0.5f || (rest == 0.5f && (whole & 1) != 0) ? 1 : 0);
}

}  // namespace

float e4m4_decode(uint8_t code) noexcept {
  const uint32_t exponent = code >> mantissa_bits;
  const uint32_t mantissa = code & 0xF;
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-14f;
  return std::bit_cast<float>((exponent + rebias) << fp32_mantissa_bits | mantissa << dropped_bits);
}

uint8_t e4m4_encode(float value) noexcept {
  if (!(value > 0)) return 0;
  if (value >= e4m4_max) return 0xFF;
  // Scaled to units of the smallest value; 16 units are the code of the smallest normal, so the carry is free.
  if (value < e4m4_min_normal) return static_cast<uint8_t>(round_half_even(value * 0x1p14f));
  // Rounding the integer carries from the mantissa into the exponent by itself.
  const uint32_t rebased = std::bit_cast<uint32_t>(value) - (rebias << fp32_mantissa_bits);
  const uint32_t lowest_kept = (rebased >> dropped_bits) & 1;
  return static_cast<uint8_t>((rebased + (1u << (dropped_bits - 1)) - 1 + lowest_kept) >> dropped_bits);
}

uint8_t e4m4_encode_bnb(float value) noexcept {
  if (!(value > 0)) return 0;
  if (value < e4m4_min_normal) return static_cast<uint8_t>(std::min(round_half_even(value * 0x1p14f), 15u));
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t exponent = std::min((bits >> fp32_mantissa_bits) - rebias, 15u);
  const float fraction = static_cast<float>(bits & ((1u << fp32_mantissa_bits) - 1));  // below 2^23: exact
  const uint32_t mantissa = std::min(round_half_even(fraction * 0x1p-19f), 15u);
  return static_cast<uint8_t>(exponent << mantissa_bits | mantissa);
}

}  // namespace w4q::formats
