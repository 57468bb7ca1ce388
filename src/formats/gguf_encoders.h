// Encoders of single blocks of 32, for gguf_blocks.cpp. Values are finite.
#pragma once

#include <cstdint>

namespace w4q::formats {

/// The scale is the value of largest magnitude over −8, so that it is met exactly (but for the rounding of the scale).
void gguf_encode_q4_0(const float* values, uint8_t* block) noexcept;
/// Fifteen steps from the least value to the largest.
void gguf_encode_q4_1(const float* values, uint8_t* block) noexcept;
/// The scale is the largest magnitude over 127; halves round away from zero.
void gguf_encode_q8_0(const float* values, uint8_t* block) noexcept;

}  // namespace w4q::formats
