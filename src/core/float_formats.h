// Bit-exact conversion between fp32 and the short float formats, one value at a time, round to nearest even.
// These scalar functions are the definition; core/convert.h has the fast loops over arrays.
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.h"

namespace w4q {

/// IEEE binary16. Overflow gives infinity, NaN stays NaN (payload's top bits kept, made quiet).
uint16_t f16_from_f32(float value) noexcept;
float f32_from_f16(uint16_t bits) noexcept;

/// bfloat16: the top half of a binary32. NaN stays NaN, made quiet.
uint16_t bf16_from_f32(float value) noexcept;
inline float f32_from_bf16(uint16_t bits) noexcept { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

/// OCP FP8 E4M3 ("fn"): bias 7, largest 448 = 0x7E, NaN = 0x7F / 0xFF, no infinity. Saturates at ±448.
uint8_t e4m3_from_f32(float value) noexcept;
float f32_from_e4m3(uint8_t bits) noexcept;

/// OCP E2M1, the 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 … 7, and the same negated, −0 included, for 8
/// … 15. Ties go to the even code; saturates at ±6. NaN, which it has not, becomes a zero.
W4Q_HOST_DEVICE constexpr uint32_t e2m1_magnitude(float x) noexcept {  // of x ≥ 0
  return (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
}
W4Q_HOST_DEVICE constexpr uint32_t e2m1_from_f32(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  return e2m1_magnitude(std::bit_cast<float>(bits & 0x7FFFFFFFu)) | bits >> 31 << 3;
}
W4Q_HOST_DEVICE constexpr float f32_from_e2m1(uint32_t code) noexcept {
  const uint32_t magnitude = code & 7u;
  const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                    : static_cast<float>((2u + magnitude % 2u) << (magnitude / 2u)) * 0.25f;
  return (code & 8u) != 0 ? -value : value;
}

/// OCP E8M0, a power of two: 2^(bits − 127), NaN = 0xFF. Rounds up, so that what was divided by it stays within the
/// range that `value` was chosen for; 2^−127 for whatever is smaller, zero and below included; saturates at 2^127.
uint8_t e8m0_from_f32(float value) noexcept;
float f32_from_e8m0(uint8_t bits) noexcept;

}  // namespace w4q
