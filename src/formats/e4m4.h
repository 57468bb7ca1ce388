// E4M4: an unsigned 8-bit float for block scales. byte = e << 4 | m; e ≥ 1 means 2^(e−11)·(1 + m/16), e = 0 means
// 2^(−10)·m/16. Largest 31 (0xFF), smallest normal 2^-10 (0x10), smallest 2^-14 (0x01). No sign, infinity or NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.h"

namespace w4q::formats {

inline constexpr float e4m4_max = 31.0f;
inline constexpr float e4m4_min_normal = 0x1p-10f;

namespace detail {

inline constexpr uint32_t e4m4_mantissa_bits = 4;
inline constexpr uint32_t fp32_mantissa_bits = 23;
inline constexpr uint32_t e4m4_dropped_bits = fp32_mantissa_bits - e4m4_mantissa_bits;
/// Exponent field of fp32 less that of E4M4 for the same value.
inline constexpr uint32_t e4m4_rebias = 127 - 11;

/// `value` in [0, 2^23) to the nearest integer, ties to even, whatever the rounding mode.
W4Q_HOST_DEVICE inline uint32_t round_half_even(float value) noexcept {
  const auto whole = static_cast<uint32_t>(value);
  const float rest = value - static_cast<float>(whole);  // exact
  return whole + (rest > 0.5f || (rest == 0.5f && (whole & 1) != 0) ? 1 : 0);
}

}  // namespace detail

W4Q_HOST_DEVICE inline float e4m4_decode(uint8_t code) noexcept {
  if (code < 0x10) return static_cast<float>(code) * 0x1p-14f;
  return std::bit_cast<float>((static_cast<uint32_t>(code) << detail::e4m4_dropped_bits) +
                              (detail::e4m4_rebias << detail::fp32_mantissa_bits));
}

/// w4q's rule: the nearest of the 256 values, ties to the even code, carry into the exponent, saturating at 0xFF.
/// Zero for anything that is not positive.
W4Q_HOST_DEVICE inline uint8_t e4m4_encode(float value) noexcept {
  if (!(value > 0)) return 0;
  if (value >= e4m4_max) return 0xFF;
  // In units of the smallest value; 16 of them are the code of the smallest normal, so the carry is free.
  if (value < e4m4_min_normal) return static_cast<uint8_t>(detail::round_half_even(value * 0x1p14f));
  // Rounding the integer carries from the mantissa into the exponent by itself.
  const uint32_t rebased = std::bit_cast<uint32_t>(value) - (detail::e4m4_rebias << detail::fp32_mantissa_bits);
  const uint32_t lowest_kept = (rebased >> detail::e4m4_dropped_bits) & 1;
  const uint32_t below_half = (1u << (detail::e4m4_dropped_bits - 1)) - 1;
  return static_cast<uint8_t>((rebased + below_half + lowest_kept) >> detail::e4m4_dropped_bits);
}

/// bitsandbytes' rule (docs/kbit.md): the mantissa is rounded without carry, and values ≥ 32 keep their own mantissa.
uint8_t e4m4_encode_bnb(float value) noexcept;

}  // namespace w4q::formats
