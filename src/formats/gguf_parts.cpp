#include "formats/gguf_parts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "formats/gguf_decoders.h"

namespace w4q::formats {
namespace {

using Levels = std::span<uint8_t>;

/// The low four bits of 32 codes: the first sixteen in the low halves of bytes.
void take_nibbles(const uint8_t* bytes, Levels levels) noexcept {
  for (size_t i = 0; i < 16; ++i) levels[i] = bytes[i] & 15, levels[16 + i] = bytes[i] >> 4;
}

/// Two bits of 256 codes: 128 weights in 32 bytes, 32 a pair of bits.
void add_pairs(const uint8_t* bytes, int shift, Levels levels) noexcept {
  for (size_t i = 0; i < 256; ++i) {
    levels[i] = static_cast<uint8_t>(levels[i] | (bytes[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3) << shift);
  }
}

/// One bit of 256 codes: 32 weights a bit of 32 bytes.
void add_bits(const uint8_t* bytes, int shift, Levels levels) noexcept {
  for (size_t i = 0; i < 256; ++i) {
    levels[i] = static_cast<uint8_t>(levels[i] | (bytes[i % 32] >> (i / 32) & 1) << shift);
  }
}

/// Blocks of 32.
GgufScales read_short(const GgufForm& form, const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales;
  scales.scales.fill(1), scales.minimums.fill(1);
  if (form.type == GgmlType::mxfp4) {
    scales.d = std::ldexp(1.0f, bytes[0] - 128);
    take_nibbles(bytes + 1, levels);
    for (uint8_t& level : levels) level = static_cast<uint8_t>(level < 8 ? level + 7 : 15 - level);
    return scales;
  }
  scales.d = gguf_half(bytes);
  const uint8_t* at = bytes + 2;
  if (form.signed_minimum) {
    scales.d_minimum = -gguf_half(at);
    at += 2;
  }
  if (form.levels() == 256) {
    std::transform(at, at + 32, levels.begin(), [](uint8_t code) { return static_cast<uint8_t>(code ^ 0x80); });
    return scales;
  }
  uint32_t fifths = 0;
  if (form.levels() == 32) {
    std::memcpy(&fifths, at, sizeof fifths);
    at += sizeof fifths;
  }
  take_nibbles(at, levels);
  for (size_t i = 0; i < 32; ++i) levels[i] = static_cast<uint8_t>(levels[i] | (fifths >> i & 1) << 4);
  return scales;
}

GgufScales read_q2_k(const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales{.d = gguf_half(bytes + 80), .d_minimum = gguf_half(bytes + 82)};
  for (size_t j = 0; j < 16; ++j) scales.scales[j] = bytes[j] & 15, scales.minimums[j] = bytes[j] >> 4;
  add_pairs(bytes + 16, 0, levels);
  return scales;
}

GgufScales read_q3_k(const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales{.d = gguf_half(bytes + 108)};
  const uint8_t* packed = bytes + 96;
  for (size_t j = 0; j < 16; ++j) {
    const int low = packed[j % 8] >> (j < 8 ? 0 : 4) & 15, high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    scales.scales[j] = static_cast<int16_t>((low | high << 4) - 32);
  }
  add_pairs(bytes + 32, 0, levels);
  add_bits(bytes, 2, levels);
  return scales;
}

GgufScales read_q45_k(const GgufForm& form, const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales{.d = gguf_half(bytes), .d_minimum = gguf_half(bytes + 2)};
  const uint8_t* packed = bytes + 4;
  for (size_t j = 0; j < 4; ++j) {
    scales.scales[j] = packed[j] & 63, scales.minimums[j] = packed[j + 4] & 63;
    scales.scales[j + 4] = static_cast<int16_t>((packed[j + 8] & 15) | packed[j] >> 6 << 4);
    scales.minimums[j + 4] = static_cast<uint8_t>(packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4);
  }
  const uint8_t* codes = bytes + 16;
  if (form.type == GgmlType::q5_k) {
    add_bits(codes, 4, levels);
    codes += 32;
  }
  for (size_t i = 0; i < 256; ++i) {
    levels[i] = static_cast<uint8_t>(levels[i] | (codes[i / 64 * 32 + i % 32] >> (4 * (i % 64 / 32)) & 15));
  }
  return scales;
}

GgufScales read_q6_k(const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales{.d = gguf_half(bytes + 208)};
  for (size_t j = 0; j < 16; ++j) scales.scales[j] = static_cast<int8_t>(bytes[192 + j]);
  for (size_t i = 0; i < 256; ++i) {
    const size_t half = i / 128, group = i % 128 / 32;
    levels[i] = bytes[64 * half + 32 * (group % 2) + i % 32] >> (4 * (group / 2)) & 15;
  }
  add_pairs(bytes + 128, 4, levels);
  return scales;
}

GgufScales read_iq4_xs(const uint8_t* bytes, Levels levels) noexcept {
  GgufScales scales{.d = gguf_half(bytes)};
  uint16_t high = 0;
  std::memcpy(&high, bytes + 2, sizeof high);
  for (size_t j = 0; j < 8; ++j) {
    const int scale = (bytes[4 + j / 2] >> (4 * (j % 2)) & 15) | (high >> (2 * j) & 3) << 4;
    scales.scales[j] = static_cast<int16_t>(scale - 32);
    take_nibbles(bytes + 8 + 16 * j, levels.subspan(32 * j, 32));
  }
  return scales;
}

}  // namespace

GgufScales read_gguf_block(const GgufForm& form, std::span<const std::byte> block, std::span<uint8_t> levels) {
  ensure(!form.lattice && levels.size() == static_cast<size_t>(form.block) &&
             block.size() == static_cast<size_t>(describe(form.type).block_bytes),
         "a GGUF block of another size");
  const auto* bytes = reinterpret_cast<const uint8_t*>(block.data());
  std::ranges::fill(levels, uint8_t{0});
  switch (form.type) {
    case GgmlType::q2_k:
      return read_q2_k(bytes, levels);
    case GgmlType::q3_k:
      return read_q3_k(bytes, levels);
    case GgmlType::q4_k:
    case GgmlType::q5_k:
      return read_q45_k(form, bytes, levels);
    case GgmlType::q6_k:
      return read_q6_k(bytes, levels);
    case GgmlType::iq4_xs:
      return read_iq4_xs(bytes, levels);
    default:
      return read_short(form, bytes, levels);
  }
}

}  // namespace w4q::formats
