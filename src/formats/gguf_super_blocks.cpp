// Blocks of 256 weights: sub-blocks of 16 or 32 whose scales (and minimums) are small integers times one f16.
#include "formats/gguf_decoders.h"

namespace w4q::formats {
namespace {

struct ScaleAndMinimum {
  int scale, minimum;
};

/// The pair of sub-block j (0 … 7) in the 12 bytes of Q4_K and Q5_K: 6 bits each, the upper two of the last four pairs
/// in the spare bits of the first.
ScaleAndMinimum scale_and_minimum(const uint8_t* s, int j) noexcept {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4};
}

/// The scale of sub-block j (0 … 15) in the 12 bytes of Q3_K: 4 bits in the first eight bytes, 2 in the last four.
int q3_scale(const uint8_t* s, int j) noexcept {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  return (low | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
}

}  // namespace

void gguf_decode_q2_k(const uint8_t* block, float* out) noexcept {
  const uint8_t* codes = block + 16;
  const float d = gguf_half(block + 80), d_minimum = gguf_half(block + 82);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(block[j] & 15), minimum = d_minimum * static_cast<float>(block[j] >> 4);
    const uint8_t* bytes = codes + 32 * (j / 8) + 16 * (j % 2);
    const int shift = 2 * (j % 8 / 2);
    for (int i = 0; i < 16; ++i) out[16 * j + i] = scale * static_cast<float>(bytes[i] >> shift & 3) - minimum;
  }
}

void gguf_decode_q3_k(const uint8_t* block, float* out) noexcept {
  const uint8_t* high = block;
  const uint8_t* codes = block + 32;
  const float d = gguf_half(block + 108);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(q3_scale(block + 96, j));
    const uint8_t* bytes = codes + 32 * (j / 8) + 16 * (j % 2);
    const int shift = 2 * (j % 8 / 2), bit = j / 2;
    for (int i = 0; i < 16; ++i) {
      const int code = (bytes[i] >> shift & 3) | (high[16 * (j % 2) + i] >> bit & 1) << 2;
      out[16 * j + i] = scale * static_cast<float>(code - 4);
    }
  }
}

void gguf_decode_q4_k(const uint8_t* block, float* out) noexcept {
  const uint8_t* codes = block + 16;
  const float d = gguf_half(block), d_minimum = gguf_half(block + 2);
  for (int j = 0; j < 8; ++j) {
    const auto pair = scale_and_minimum(block + 4, j);
    const float scale = d * static_cast<float>(pair.scale), minimum = d_minimum * static_cast<float>(pair.minimum);
    const uint8_t* bytes = codes + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int i = 0; i < 32; ++i) out[32 * j + i] = scale * static_cast<float>(bytes[i] >> shift & 15) - minimum;
  }
}

void gguf_decode_q5_k(const uint8_t* block, float* out) noexcept {
  const uint8_t* high = block + 16;
  const uint8_t* codes = block + 48;
  const float d = gguf_half(block), d_minimum = gguf_half(block + 2);
  for (int j = 0; j < 8; ++j) {
    const auto pair = scale_and_minimum(block + 4, j);
    const float scale = d * static_cast<float>(pair.scale), minimum = d_minimum * static_cast<float>(pair.minimum);
    const uint8_t* bytes = codes + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int i = 0; i < 32; ++i) {
      const int code = (bytes[i] >> shift & 15) | (high[i] >> j & 1) << 4;
      out[32 * j + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

void gguf_decode_q6_k(const uint8_t* block, float* out) noexcept {
  const uint8_t* low = block;
  const uint8_t* high = block + 128;
  const float d = gguf_half(block + 208);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + j]));
    const int half = j / 8, group = j % 8 / 2, first = 16 * (j % 2);  // two halves of four groups of 32
    const uint8_t* low_bytes = low + 64 * half + 32 * (group % 2) + first;
    const uint8_t* high_bytes = high + 32 * half + first;
    for (int i = 0; i < 16; ++i) {
      const int code = (low_bytes[i] >> 4 * (group / 2) & 15) | (high_bytes[i] >> 2 * group & 3) << 4;
      out[16 * j + i] = scale * static_cast<float>(code - 32);
    }
  }
}

void gguf_decode_iq4_xs(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block);
  uint16_t high = 0;
  std::memcpy(&high, block + 2, sizeof high);
  for (int j = 0; j < 8; ++j) {
    const int scale = (block[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4;
    const float step = d * static_cast<float>(scale - 32);
    const uint8_t* bytes = block + 8 + 16 * j;
    for (int i = 0; i < 16; ++i) {
      out[32 * j + i] = step * static_cast<float>(gguf_iq4_levels[bytes[i] & 15]);
      out[32 * j + 16 + i] = step * static_cast<float>(gguf_iq4_levels[bytes[i] >> 4]);
    }
  }
}

}  // namespace w4q::formats
