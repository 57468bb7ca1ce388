// Bit-exact conversion between fp32 and the short float formats, one value at a time, round to nearest even.
// These scalar functions are the definition; core/convert.h has the fast loops over arrays.
#pragma once

#include <bit>
#include <cstdint>

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

/// OCP FP8 E5M2: bias 15, infinity and NaN as in IEEE. Overflow gives infinity.
uint8_t e5m2_from_f32(float value) noexcept;
float f32_from_e5m2(uint8_t bits) noexcept;

}  // namespace w4q
