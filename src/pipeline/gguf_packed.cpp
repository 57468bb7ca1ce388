#include "pipeline/gguf_packed.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "formats/gguf_blocks.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"
#include "formats/table/table_format.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t block = 32;
constexpr std::array<std::pair<GgmlType, int>, 2> widths{{{GgmlType::q4_0, 4}, {GgmlType::q8_0, 8}}};

formats::Scheme scheme_with(int bits) {
  return {formats::SchemeFamily::integer, bits, static_cast<int>(block), formats::ScaleType::f16, false, false};
}

/// E2M1 with a power of two for 32 weights.
formats::Scheme small_floats() {
  return {.family = formats::SchemeFamily::small_float,
          .bits = 4,
          .block = static_cast<int>(block),
          .scale = formats::ScaleType::e8m0};
}

formats::TableFormat table_of(const formats::Scheme& scheme) {
  return formats::scheme_row(scheme.family).table(scheme);
}

constexpr size_t float_bytes = 17, half = block / 2;

/// Blocks of a power of two and 32 codes, the first half of them in the low nibbles.
void pack_floats(std::span<const uint8_t> codes, std::span<const uint8_t> scales, std::span<std::byte> blocks) {
  for (size_t b = 0; b < scales.size(); ++b) {
    std::byte* const to = blocks.data() + b * float_bytes;
    const uint8_t* const from = codes.data() + b * block;
    to[0] = static_cast<std::byte>(scales[b]);
    for (size_t i = 0; i < half; ++i) to[1 + i] = static_cast<std::byte>(from[i] | from[half + i] << 4);
  }
}

void unpack_floats(std::span<const std::byte> blocks, std::span<uint8_t> codes, std::span<uint8_t> scales) {
  for (size_t b = 0; b < scales.size(); ++b) {
    const std::byte* const from = blocks.data() + b * float_bytes;
    uint8_t* const to = codes.data() + b * block;
    scales[b] = static_cast<uint8_t>(from[0]);
    for (size_t i = 0; i < half; ++i) {
      to[i] = static_cast<uint8_t>(from[1 + i]) & 15;
      to[half + i] = static_cast<uint8_t>(from[1 + i]) >> 4;
    }
  }
}

formats::PackedWeight floats_from_gguf(int64_t n, int64_t k,
                                       const std::function<std::span<const std::byte>(int64_t row)>& row_bytes) {
  const formats::Scheme scheme = small_floats();
  auto weight = formats::allocate_canonical(scheme, n, k);
  std::ranges::copy(formats::small_float_table(scheme.bits),
                    weight.plane(formats::PlaneRole::codebook).bytes.as<float>().begin());
  const auto groups = static_cast<size_t>(k / block);
  const auto all_scales = weight.plane(formats::PlaneRole::scales).bytes.as<uint8_t>();
  parallel_for(n, 16, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(k));
    for (int64_t row = begin; row < end; ++row) {
      unpack_floats(row_bytes(row), codes, all_scales.subspan(static_cast<size_t>(row) * groups, groups));
      formats::table_write_codes(table_of(scheme), weight, row, codes);
    }
  });
  return weight;
}

}  // namespace

std::optional<formats::Scheme> scheme_of_gguf(GgmlType type) {
  if (type == GgmlType::mxfp4) return small_floats();
  const auto row = std::ranges::find(widths, type, &std::pair<GgmlType, int>::first);
  return row == widths.end() ? std::nullopt : std::optional(scheme_with(row->second));
}

std::optional<GgmlType> gguf_of_scheme(const formats::Scheme& scheme) {
  if (scheme == small_floats()) return GgmlType::mxfp4;
  for (const auto& [type, bits] : widths) {
    if (scheme == scheme_with(bits)) return type;
  }
  return std::nullopt;
}

void pack_gguf_row(const formats::PackedWeight& weight, int64_t row, GgmlType type, std::span<std::byte> blocks) {
  std::vector<uint8_t> codes(static_cast<size_t>(weight.k));
  const auto groups = static_cast<size_t>(weight.k / block);
  if (type == GgmlType::mxfp4) {
    formats::table_read_codes(table_of(weight.scheme), weight, row, codes);
    const auto powers = weight.plane(formats::PlaneRole::scales).bytes.as<uint8_t>();
    return pack_floats(codes, powers.subspan(static_cast<size_t>(row) * groups, groups), blocks);
  }
  formats::integer_read_codes(weight, row, codes);
  const auto all_scales = weight.plane(formats::PlaneRole::scales).bytes.as<uint16_t>();
  const auto scales = all_scales.subspan(static_cast<size_t>(row) * groups, groups);
  if (type == GgmlType::q4_0) {
    formats::gguf_pack_q4_0(codes, scales, blocks);
  } else {
    formats::gguf_pack_q8_0(codes, scales, blocks);
  }
}

formats::PackedWeight packed_from_gguf(GgmlType type, int64_t n, int64_t k,
                                       const std::function<std::span<const std::byte>(int64_t row)>& row_bytes) {
  if (type == GgmlType::mxfp4) return floats_from_gguf(n, k, row_bytes);
  auto weight = formats::allocate_integer(scheme_of_gguf(type).value(), n, k);
  const auto groups = static_cast<size_t>(k / block);
  const auto all_scales = weight.plane(formats::PlaneRole::scales).bytes.as<uint16_t>();
  parallel_for(n, 16, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(k));
    for (int64_t row = begin; row < end; ++row) {
      const auto scales = all_scales.subspan(static_cast<size_t>(row) * groups, groups);
      if (type == GgmlType::q4_0) {
        formats::gguf_unpack_q4_0(row_bytes(row), codes, scales);
      } else {
        formats::gguf_unpack_q8_0(row_bytes(row), codes, scales);
      }
      formats::integer_write_codes(weight, row, codes);
    }
  });
  return weight;
}

}  // namespace w4q::pipeline
