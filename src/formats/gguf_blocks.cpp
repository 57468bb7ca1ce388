#include "formats/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/convert.h"
#include "core/dtype.h"
#include "core/error.h"
#include "formats/gguf_decoders.h"
#include "formats/gguf_encoders.h"

namespace w4q::formats {
namespace {

// ---- blocks of 32: the first 16 weights in the low nibbles, the others in the high ones -----------------------------

void decode_q4_0(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((block[2 + i] & 15) - 8);
    out[16 + i] = d * static_cast<float>((block[2 + i] >> 4) - 8);
  }
}

void decode_q4_1(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block), minimum = gguf_half(block + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(block[4 + i] & 15) + minimum;
    out[16 + i] = d * static_cast<float>(block[4 + i] >> 4) + minimum;
  }
}

/// The 32 codes of five bits: the fifth in a word, bit i for weight i, in front of the nibbles.
void q5_codes(const uint8_t* fifth, int* codes) noexcept {
  uint32_t bits = 0;
  std::memcpy(&bits, fifth, sizeof bits);
  const uint8_t* nibbles = fifth + 4;
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int>((nibbles[i] & 15u) | (bits >> i & 1) << 4);
    codes[16 + i] = static_cast<int>((nibbles[i] >> 4u) | (bits >> (16 + i) & 1) << 4);
  }
}

void decode_q5_0(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block);
  int codes[32];
  q5_codes(block + 2, codes);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(codes[i] - 16);
}

void decode_q5_1(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block), minimum = gguf_half(block + 2);
  int codes[32];
  q5_codes(block + 4, codes);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(codes[i]) + minimum;
}

void decode_q8_0(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

void decode_iq4_nl(const uint8_t* block, float* out) noexcept {
  const float d = gguf_half(block);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(gguf_iq4_levels[block[2 + i] & 15]);
    out[16 + i] = d * static_cast<float>(gguf_iq4_levels[block[2 + i] >> 4]);
  }
}

/// A power of two, 2^(e − 128), and sixteen bytes of E2M1 with doubled magnitudes.
void decode_mxfp4(const uint8_t* block, float* out) noexcept {
  const float d = std::ldexp(1.0f, block[0] - 128);
  const auto value = [&](int code) {
    const float magnitude = d * static_cast<float>(gguf_mxfp4_levels[7 + (code & 7)]);
    return code > 8 ? -magnitude : magnitude;
  };
  for (int i = 0; i < 16; ++i) {
    out[i] = value(block[1 + i] & 15);
    out[16 + i] = value(block[1 + i] >> 4);
  }
}

// ---- the table of types ---------------------------------------------------------------------------------------------

struct Row {
  GgmlType type;
  void (*decode)(const uint8_t* block, float* out) noexcept;
  void (*encode)(const float* values, uint8_t* block) noexcept;  ///< null: w4q does not make this type
  float largest;
};

constexpr float f16_max = 65504.0f;

constexpr std::array<Row, 18> rows{{
    {GgmlType::q4_0, decode_q4_0, gguf_encode_q4_0, 8 * f16_max},
    {GgmlType::q4_1, decode_q4_1, gguf_encode_q4_1, f16_max},
    {GgmlType::q5_0, decode_q5_0, nullptr, 0},
    {GgmlType::q5_1, decode_q5_1, nullptr, 0},
    {GgmlType::q8_0, decode_q8_0, gguf_encode_q8_0, 127 * f16_max},
    {GgmlType::q2_k, gguf_decode_q2_k, nullptr, 0},
    {GgmlType::q3_k, gguf_decode_q3_k, nullptr, 0},
    {GgmlType::q4_k, gguf_decode_q4_k, nullptr, 0},
    {GgmlType::q5_k, gguf_decode_q5_k, nullptr, 0},
    {GgmlType::q6_k, gguf_decode_q6_k, nullptr, 0},
    {GgmlType::iq4_nl, decode_iq4_nl, nullptr, 0},
    {GgmlType::iq4_xs, gguf_decode_iq4_xs, nullptr, 0},
    {GgmlType::iq2_xxs, gguf_decode_iq2_xxs, nullptr, 0},
    {GgmlType::iq2_xs, gguf_decode_iq2_xs, nullptr, 0},
    {GgmlType::iq2_s, gguf_decode_iq2_s, nullptr, 0},
    {GgmlType::iq3_xxs, gguf_decode_iq3_xxs, nullptr, 0},
    {GgmlType::iq3_s, gguf_decode_iq3_s, nullptr, 0},
    {GgmlType::mxfp4, decode_mxfp4, nullptr, 0},
}};

const Row* find_row(GgmlType type) noexcept {
  const auto row = std::ranges::find(rows, type, &Row::type);
  return row == rows.end() ? nullptr : &*row;
}

bool is_plain(GgmlType type) noexcept {
  return type == GgmlType::f32 || type == GgmlType::f16 || type == GgmlType::bf16;
}

DType plain_dtype(GgmlType type) noexcept {
  return type == GgmlType::f32 ? DType::f32 : type == GgmlType::f16 ? DType::f16 : DType::bf16;
}

void check_sizes(GgmlType type, size_t bytes, size_t elements) {
  const auto& row = describe(type);
  const auto block = static_cast<size_t>(row.block), block_bytes = static_cast<size_t>(row.block_bytes);
  ensure(elements % block == 0 && bytes == elements / block * block_bytes, "GGUF blocks of the wrong size");
}

}  // namespace

bool gguf_decodes(GgmlType type) noexcept { return is_plain(type) || find_row(type) != nullptr; }

bool gguf_encodes(GgmlType type) noexcept {
  const Row* row = find_row(type);
  return is_plain(type) || (row != nullptr && row->encode != nullptr);
}

float gguf_largest(GgmlType type) noexcept {
  if (type == GgmlType::f16) return f16_max;
  const Row* row = find_row(type);
  // The largest bf16: values above would round to infinity.
  return row != nullptr ? row->largest : type == GgmlType::bf16 ? 0x1.FEp127f : std::numeric_limits<float>::max();
}

void gguf_decode(GgmlType type, std::span<const std::byte> blocks, std::span<float> out) {
  ensure(gguf_decodes(type), "a GGUF type that is not decoded");
  check_sizes(type, blocks.size(), out.size());
  if (is_plain(type)) return widen(blocks, plain_dtype(type), out);
  const auto& size = describe(type);
  const auto decode = find_row(type)->decode;
  const auto* bytes = reinterpret_cast<const uint8_t*>(blocks.data());
  for (size_t at = 0; at < out.size(); at += static_cast<size_t>(size.block), bytes += size.block_bytes) {
    decode(bytes, out.data() + at);
  }
}

void gguf_encode(GgmlType type, std::span<const float> values, std::span<std::byte> blocks) {
  ensure(gguf_encodes(type), "a GGUF type that is not written");
  check_sizes(type, blocks.size(), values.size());
  if (is_plain(type)) return narrow(values, plain_dtype(type), blocks);
  const auto& size = describe(type);
  const auto encode = find_row(type)->encode;
  auto* bytes = reinterpret_cast<uint8_t*>(blocks.data());
  for (size_t at = 0; at < values.size(); at += static_cast<size_t>(size.block), bytes += size.block_bytes) {
    encode(values.data() + at, bytes);
  }
}

}  // namespace w4q::formats
