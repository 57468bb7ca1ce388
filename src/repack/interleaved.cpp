#include "repack/integer_layout.h"
#include "repack/layout_interleaved.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

struct Interleaved {
  using Map = InterleavedMap;
  static constexpr std::string_view name = "interleaved";
  static constexpr std::string_view description = "blocks of 32 inputs of neighbouring outputs, one 128-bit load each";
  static constexpr std::string_view reason =
      "a thread that owns an output reads a block of 32 codes with one 128-bit load next to its neighbour's";
  static constexpr std::span<const int> sms{};
  static constexpr bool sorts_inputs = false;

  static std::string refuse(const formats::Scheme& scheme) {
    const bool groups = scheme.block == 32 || scheme.block == 64 || scheme.block == 128;
    if (groups && scheme.bits == 4 && scheme.scale == formats::ScaleType::f16 && !scheme.act_order) return {};
    return concat("it holds int4 in groups of 32, 64 or 128 with f16 scales, got ", to_string(scheme));
  }
  static Shape code_shape(const Map& map, const formats::Scheme&) {
    return {map.padded_cols / 32, map.padded_rows, Map::block_words};
  }
};

}  // namespace

LayoutRow interleaved_row() { return IntegerLayout<Interleaved>::row(); }

}  // namespace w4q::repack
