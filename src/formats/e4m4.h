// E4M4: an unsigned 8-bit float for block scales. byte = e << 4 | m; e ≥ 1 means 2^(e−11)·(1 + m/16), e = 0 means
// 2^(−10)·m/16. Largest 31 (0xFF), smallest normal 2^-10 (0x10), smallest 2^-14 (0x01). No sign, infinity or NaN.
#pragma once

#include <cstdint>

namespace w4q::formats {

inline constexpr float e4m4_max = 31.0f;
inline constexpr float e4m4_min_normal = 0x1p-10f;

float e4m4_decode(uint8_t code) noexcept;

/// w4q's rule: the nearest of the 256 values, ties to the even code, carry into the exponent, saturating at 0xFF.
/// `value` ≥ 0 and not NaN.
uint8_t e4m4_encode(float value) noexcept;

/// bitsandbytes' rule (docs/kbit.md): the mantissa is rounded without carry, and values ≥ 32 keep their own mantissa.
uint8_t e4m4_encode_bnb(float value) noexcept;

}  // namespace w4q::formats
