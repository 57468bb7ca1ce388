// Decoders of single blocks, for gguf_blocks.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float_formats.h"

namespace w4q::formats {

/// The f16 at `bytes`, of any alignment.
inline float gguf_half(const uint8_t* bytes) noexcept {
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return f32_from_f16(bits);
}

/// IQ4_NL and IQ4_XS: what a code stands for.
inline constexpr int8_t gguf_iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

/// MXFP4: what codes stand for, in halves of the power of two, ascending. Magnitudes are codes 0 … 7, and 8 … 15 their
/// negatives; code 8 is a zero too.
inline constexpr int8_t gguf_mxfp4_levels[15] = {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12};

// Blocks of 256 with scales of sub-blocks. Each reads one block and writes 256 values.
void gguf_decode_q2_k(const uint8_t* block, float* out) noexcept;
void gguf_decode_q3_k(const uint8_t* block, float* out) noexcept;
void gguf_decode_q4_k(const uint8_t* block, float* out) noexcept;
void gguf_decode_q5_k(const uint8_t* block, float* out) noexcept;
void gguf_decode_q6_k(const uint8_t* block, float* out) noexcept;
void gguf_decode_iq4_xs(const uint8_t* block, float* out) noexcept;
// The same of points of a lattice (gguf_grids.cpp).
void gguf_decode_iq2_xxs(const uint8_t* block, float* out) noexcept;
void gguf_decode_iq2_xs(const uint8_t* block, float* out) noexcept;
void gguf_decode_iq2_s(const uint8_t* block, float* out) noexcept;
void gguf_decode_iq3_xxs(const uint8_t* block, float* out) noexcept;
void gguf_decode_iq3_s(const uint8_t* block, float* out) noexcept;

}  // namespace w4q::formats
