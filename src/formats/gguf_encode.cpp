// Codes are chosen with the scale in fp32; the f16 that is stored is rounded afterwards. That is the reference's rule,
// and following it makes the bytes equal to those of other tools.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/float_formats.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_encoders.h"

namespace w4q::formats {
namespace {

void put_bits(uint8_t* place, uint16_t bits) noexcept { std::memcpy(place, &bits, sizeof bits); }
void put_half(uint8_t* place, float value) noexcept { put_bits(place, f16_from_f32(value)); }

/// 1/d, or 0 where that is not finite: such a scale is stored as 0, so the codes do not matter.
float inverse(float d) noexcept {
  const float result = d == 0 ? 0 : 1.0f / d;
  return std::isfinite(result) ? result : 0;
}

void put_nibbles(const uint8_t* codes, uint8_t* bytes) noexcept {
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
}

void check_planes(GgmlType type, size_t codes, size_t scales, size_t bytes) {
  const auto block_bytes = static_cast<size_t>(describe(type).block_bytes);
  ensure(codes == scales * 32 && bytes == scales * block_bytes, "integer planes and GGUF blocks of different sizes");
}

}  // namespace

void gguf_encode_q4_0(const float* values, uint8_t* block) noexcept {
  float extreme = 0;
  for (int i = 0; i < 32; ++i) {
    if (std::abs(values[i]) > std::abs(extreme)) extreme = values[i];
  }
  const float d = extreme / -8, id = inverse(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>(std::min(15, static_cast<int>(values[i] * id + 8.5f)));
  }
  put_half(block, d);
  put_nibbles(codes, block + 2);
}

void gguf_encode_q4_1(const float* values, uint8_t* block) noexcept {
  const float minimum = *std::min_element(values, values + 32), largest = *std::max_element(values, values + 32);
  const float d = (largest - minimum) / 15, id = inverse(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>(std::min(15, static_cast<int>((values[i] - minimum) * id + 0.5f)));
  }
  put_half(block, d);
  put_half(block + 2, minimum);
  put_nibbles(codes, block + 4);
}

void gguf_encode_q8_0(const float* values, uint8_t* block) noexcept {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(values[i]));
  const float d = largest / 127, id = inverse(d);
  put_half(block, d);
  for (int i = 0; i < 32; ++i) block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(values[i] * id)));
}

void gguf_pack_q4_0(std::span<const uint8_t> codes, std::span<const uint16_t> scales, std::span<std::byte> blocks) {
  check_planes(GgmlType::q4_0, codes.size(), scales.size(), blocks.size());
  auto* bytes = reinterpret_cast<uint8_t*>(blocks.data());
  for (size_t block = 0; block < scales.size(); ++block, bytes += 18) {
    put_bits(bytes, scales[block]);
    put_nibbles(codes.data() + 32 * block, bytes + 2);
  }
}

void gguf_pack_q8_0(std::span<const uint8_t> codes, std::span<const uint16_t> scales, std::span<std::byte> blocks) {
  check_planes(GgmlType::q8_0, codes.size(), scales.size(), blocks.size());
  auto* bytes = reinterpret_cast<uint8_t*>(blocks.data());
  for (size_t block = 0; block < scales.size(); ++block, bytes += 34) {
    put_bits(bytes, scales[block]);
    // code − 128 in two's complement is the code with its top bit flipped.
    for (size_t i = 0; i < 32; ++i) bytes[2 + i] = codes[32 * block + i] ^ 0x80;
  }
}

void gguf_unpack_q4_0(std::span<const std::byte> blocks, std::span<uint8_t> codes, std::span<uint16_t> scales) {
  check_planes(GgmlType::q4_0, codes.size(), scales.size(), blocks.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(blocks.data());
  for (size_t block = 0; block < scales.size(); ++block, bytes += 18) {
    std::memcpy(&scales[block], bytes, sizeof(uint16_t));
    for (size_t i = 0; i < 16; ++i) {
      codes[32 * block + i] = bytes[2 + i] & 15;
      codes[32 * block + 16 + i] = bytes[2 + i] >> 4;
    }
  }
}

void gguf_unpack_q8_0(std::span<const std::byte> blocks, std::span<uint8_t> codes, std::span<uint16_t> scales) {
  check_planes(GgmlType::q8_0, codes.size(), scales.size(), blocks.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(blocks.data());
  for (size_t block = 0; block < scales.size(); ++block, bytes += 34) {
    std::memcpy(&scales[block], bytes, sizeof(uint16_t));
    for (size_t i = 0; i < 32; ++i) codes[32 * block + i] = bytes[2 + i] ^ 0x80;
  }
}

}  // namespace w4q::formats
