#include "formats/gguf_forms.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/float_formats.h"
#include "formats/gguf_decoders.h"

namespace w4q::formats {
namespace {

constexpr float f16_max = 65504.0f;
/// Above it squares of weights, weighted and summed, might leave fp32.
constexpr float float_max = 0x1p40f;

constexpr std::array<GgufForm, 13> forms{{
    {.type = GgmlType::q4_0, .lowest_level = -8, .highest_level = 7, .largest = 7 * f16_max},
    {.type = GgmlType::q4_1, .highest_level = 15, .signed_minimum = true, .largest = f16_max},
    {.type = GgmlType::q5_0, .lowest_level = -16, .highest_level = 15, .largest = 15 * f16_max},
    {.type = GgmlType::q5_1, .highest_level = 31, .signed_minimum = true, .largest = f16_max},
    {.type = GgmlType::q8_0, .lowest_level = -128, .highest_level = 127, .largest = 127 * f16_max},
    {.type = GgmlType::iq4_nl, .table = gguf_iq4_levels, .largest = 113 * f16_max},
    {.type = GgmlType::mxfp4, .table = gguf_mxfp4_levels, .unit = GgufUnit::e8m0_half, .largest = float_max},
    {.type = GgmlType::q2_k,
     .block = 256,
     .part = 16,
     .highest_level = 3,
     .lowest_scale = 0,
     .highest_scale = 15,
     .highest_minimum = 15,
     .largest = 15 * f16_max},
    {.type = GgmlType::q3_k,
     .block = 256,
     .part = 16,
     .lowest_level = -4,
     .highest_level = 3,
     .lowest_scale = -32,
     .highest_scale = 31,
     .largest = 31 * 3 * f16_max},
    {.type = GgmlType::q4_k,
     .block = 256,
     .highest_level = 15,
     .lowest_scale = 0,
     .highest_scale = 63,
     .highest_minimum = 63,
     .largest = 63 * f16_max},
    {.type = GgmlType::q5_k,
     .block = 256,
     .highest_level = 31,
     .lowest_scale = 0,
     .highest_scale = 63,
     .highest_minimum = 63,
     .largest = 63 * f16_max},
    {.type = GgmlType::q6_k,
     .block = 256,
     .part = 16,
     .lowest_level = -32,
     .highest_level = 31,
     .lowest_scale = -128,
     .highest_scale = 127,
     .largest = 31 * 127 * f16_max},
    {.type = GgmlType::iq4_xs,
     .block = 256,
     .table = gguf_iq4_levels,
     .lowest_scale = -32,
     .highest_scale = 31,
     .largest = 31 * 113 * f16_max},
}};

/// Of points with the largest magnitudes in all places.
constexpr GgufForm lattice_form(GgmlType type, int part, float largest) {
  return {.type = type, .block = 256, .part = part, .largest = largest * f16_max, .lattice = true};
}
constexpr std::array<GgufForm, 5> lattice_forms{
    lattice_form(GgmlType::iq2_xxs, 32, 3.875f * 8), lattice_form(GgmlType::iq2_xs, 16, 3.875f * 8),
    lattice_form(GgmlType::iq2_s, 16, 3.875f * 8), lattice_form(GgmlType::iq3_xxs, 32, 7.75f * 4),
    lattice_form(GgmlType::iq3_s, 32, 31)};

using Levels = std::span<const uint8_t>;

void put_half(float value, uint8_t* place) noexcept {
  const uint16_t bits = f16_from_f32(value);
  std::memcpy(place, &bits, sizeof bits);
}

/// The low four bits of 32 codes: the first sixteen in the low halves of bytes.
void put_nibbles(Levels levels, uint8_t* bytes) noexcept {
  for (size_t i = 0; i < 16; ++i) {
    bytes[i] = static_cast<uint8_t>((levels[i] & 15) | (levels[16 + i] & 15) << 4);
  }
}

void put_fifths(Levels levels, uint8_t* bytes) noexcept {
  uint32_t bits = 0;
  for (size_t i = 0; i < 32; ++i) bits |= uint32_t{levels[i]} >> 4 << i;
  std::memcpy(bytes, &bits, sizeof bits);
}

/// Blocks of 32. MXFP4's codes are sign and magnitude; its level 7 is the zero.
void store_short(const GgufForm& form, const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  if (form.type == GgmlType::mxfp4) {
    std::array<uint8_t, 32> codes{};
    std::ranges::transform(levels, codes.begin(),
                           [](uint8_t level) { return static_cast<uint8_t>(level < 7 ? 15 - level : level - 7); });
    bytes[0] = static_cast<uint8_t>(scales.d == 0 ? 0 : std::ilogb(scales.d) + 128);
    return put_nibbles(codes, bytes + 1);
  }
  put_half(scales.d, bytes);
  uint8_t* at = bytes + 2;
  if (form.signed_minimum) {
    put_half(-scales.d_minimum, at);
    at += 2;
  }
  if (form.levels() == 256) {
    std::ranges::transform(levels, at, [](uint8_t level) { return static_cast<uint8_t>(level ^ 0x80); });
    return;
  }
  if (form.levels() == 32) {
    put_fifths(levels, at);
    at += 4;
  }
  put_nibbles(levels, at);
}

/// Where weight i of a block of two-bit codes has its bits: 128 weights in 32 bytes, 32 a pair of bits.
void put_pairs(Levels levels, int shift, uint8_t* bytes) noexcept {
  for (size_t i = 0; i < 256; ++i) {
    bytes[i / 128 * 32 + i % 32] |= static_cast<uint8_t>((levels[i] >> shift & 3) << (2 * (i % 128 / 32)));
  }
}

void store_q2_k(const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  for (size_t j = 0; j < 16; ++j) bytes[j] = static_cast<uint8_t>(scales.scales[j] | scales.minimums[j] << 4);
  put_pairs(levels, 0, bytes + 16);
  put_half(scales.d, bytes + 80);
  put_half(scales.d_minimum, bytes + 82);
}

void store_q3_k(const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  for (size_t i = 0; i < 256; ++i) bytes[i % 32] |= static_cast<uint8_t>(levels[i] >> 2 << (i / 32));
  put_pairs(levels, 0, bytes + 32);
  uint8_t* packed = bytes + 96;
  for (size_t j = 0; j < 16; ++j) {
    const int scale = scales.scales[j] + 32;
    packed[j % 8] |= static_cast<uint8_t>((scale & 15) << (j < 8 ? 0 : 4));
    packed[8 + j % 4] |= static_cast<uint8_t>(scale >> 4 << (2 * (j / 4)));
  }
  put_half(scales.d, bytes + 108);
}

/// The pairs of Q4_K and Q5_K, 6 bits each, in 12 bytes.
void put_pair_scales(const GgufScales& scales, uint8_t* packed) noexcept {
  for (size_t j = 0; j < 4; ++j) {
    packed[j] = static_cast<uint8_t>(scales.scales[j] | scales.scales[j + 4] >> 4 << 6);
    packed[j + 4] = static_cast<uint8_t>(scales.minimums[j] | scales.minimums[j + 4] >> 4 << 6);
    packed[j + 8] = static_cast<uint8_t>((scales.scales[j + 4] & 15) | (scales.minimums[j + 4] & 15) << 4);
  }
}

/// Nibbles of 64 weights in 32 bytes, the second 32 in the high halves.
void put_wide_nibbles(Levels levels, uint8_t* bytes) noexcept {
  for (size_t i = 0; i < 256; ++i) {
    bytes[i / 64 * 32 + i % 32] |= static_cast<uint8_t>((levels[i] & 15) << (4 * (i % 64 / 32)));
  }
}

void store_q45_k(const GgufForm& form, const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  put_half(scales.d, bytes);
  put_half(scales.d_minimum, bytes + 2);
  put_pair_scales(scales, bytes + 4);
  uint8_t* codes = bytes + 16;
  if (form.type == GgmlType::q5_k) {
    for (size_t i = 0; i < 256; ++i) codes[i % 32] |= static_cast<uint8_t>(levels[i] >> 4 << (i / 32));
    codes += 32;
  }
  put_wide_nibbles(levels, codes);
}

void store_q6_k(const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  for (size_t i = 0; i < 256; ++i) {
    const size_t half = i / 128, group = i % 128 / 32;
    bytes[64 * half + 32 * (group % 2) + i % 32] |= static_cast<uint8_t>((levels[i] & 15) << (4 * (group / 2)));
  }
  put_pairs(levels, 4, bytes + 128);
  for (size_t j = 0; j < 16; ++j) bytes[192 + j] = static_cast<uint8_t>(static_cast<int8_t>(scales.scales[j]));
  put_half(scales.d, bytes + 208);
}

void store_iq4_xs(const GgufScales& scales, Levels levels, uint8_t* bytes) noexcept {
  put_half(scales.d, bytes);
  uint16_t high = 0;
  for (size_t j = 0; j < 8; ++j) {
    const int scale = scales.scales[j] + 32;
    bytes[4 + j / 2] |= static_cast<uint8_t>((scale & 15) << (4 * (j % 2)));
    high = static_cast<uint16_t>(high | scale >> 4 << (2 * j));
    put_nibbles(levels.subspan(32 * j, 32), bytes + 8 + 16 * j);
  }
  std::memcpy(bytes + 2, &high, sizeof high);
}

}  // namespace

std::span<const GgufForm> gguf_forms() noexcept { return forms; }

const GgufForm* find_gguf_form(GgmlType type) noexcept {
  for (const std::span<const GgufForm> all : {gguf_forms(), std::span<const GgufForm>(lattice_forms)}) {
    const auto found = std::ranges::find(all, type, &GgufForm::type);
    if (found != all.end()) return &*found;
  }
  return nullptr;
}

float gguf_unit(GgufUnit unit, float value) noexcept {
  if (value == 0) return 0;
  if (unit == GgufUnit::e8m0_half) {
    int exponent = 0;
    const float part = std::frexp(std::abs(value), &exponent);  // value = part · 2^exponent, ½ ≤ part < 1
    return std::ldexp(1.0f, std::clamp(part > 0.75f ? exponent : exponent - 1, -126, 100));
  }
  const float held = std::clamp(value, -f16_max, f16_max), stored = f32_from_f16(f16_from_f32(held));
  return stored != 0 ? stored : std::copysign(0x1p-24f, value);
}

void store_gguf_block(const GgufForm& form, const GgufScales& scales, std::span<const uint8_t> levels,
                      std::span<std::byte> out) {
  ensure(levels.size() == static_cast<size_t>(form.block) &&
             out.size() == static_cast<size_t>(describe(form.type).block_bytes),
         "a GGUF block of another size");
  auto* bytes = reinterpret_cast<uint8_t*>(out.data());
  std::fill_n(bytes, out.size(), uint8_t{0});
  switch (form.type) {
    case GgmlType::q2_k:
      return store_q2_k(scales, levels, bytes);
    case GgmlType::q3_k:
      return store_q3_k(scales, levels, bytes);
    case GgmlType::q4_k:
    case GgmlType::q5_k:
      return store_q45_k(form, scales, levels, bytes);
    case GgmlType::q6_k:
      return store_q6_k(scales, levels, bytes);
    case GgmlType::iq4_xs:
      return store_iq4_xs(scales, levels, bytes);
    default:
      return store_short(form, scales, levels, bytes);
  }
}

}  // namespace w4q::formats
