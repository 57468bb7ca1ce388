#include "pipeline/gguf_packed.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "formats/gguf_blocks.h"
#include "formats/integer.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t block = 32;
constexpr std::array<std::pair<GgmlType, int>, 2> widths{{{GgmlType::q4_0, 4}, {GgmlType::q8_0, 8}}};

formats::Scheme scheme_with(int bits) {
  return {formats::SchemeFamily::integer, bits, static_cast<int>(block), formats::ScaleType::f16, false, false};
}

}  // namespace

std::optional<formats::Scheme> scheme_of_gguf(GgmlType type) {
  const auto row = std::ranges::find(widths, type, &std::pair<GgmlType, int>::first);
  return row == widths.end() ? std::nullopt : std::optional(scheme_with(row->second));
}

std::optional<GgmlType> gguf_of_scheme(const formats::Scheme& scheme) {
  for (const auto& [type, bits] : widths) {
    if (scheme == scheme_with(bits)) return type;
  }
  return std::nullopt;
}

void pack_gguf_row(const formats::PackedWeight& weight, int64_t row, GgmlType type, std::span<std::byte> blocks) {
  std::vector<uint8_t> codes(static_cast<size_t>(weight.k));
  formats::integer_read_codes(weight, row, codes);
  const auto groups = static_cast<size_t>(weight.k / block);
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
