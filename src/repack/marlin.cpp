#include "repack/integer_layout.h"
#include "repack/marlin_words.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

struct Marlin {
  using Map = MarlinMap;
  static constexpr std::string_view name = "marlin";
  static constexpr std::string_view description = "Marlin's tiles of 16 inputs × 64 outputs, zero-padded";
  static constexpr std::string_view reason =
      "a lane reads with one 128-bit load what one step of its tensor core takes; Marlin's kernels in vLLM and "
      "IST-DASLab's checkpoints";
  static constexpr int sms[] = {80, 89, 90};
  static constexpr bool sorts_inputs = true;

  static std::string refuse(const formats::Scheme& scheme) {
    if (scheme.bits != 4 && scheme.bits != 8) return concat("it has tiles of 4 and 8 bits, got ", scheme.bits);
    if (scheme.scale == formats::ScaleType::f32) return "its scales are f16 or bf16, got f32";
    return {};
  }
  static Shape code_shape(const Map& map, const formats::Scheme&) {
    return {map.padded_cols / Map::tile_cols, map.row_words()};
  }
};

}  // namespace

LayoutRow marlin_row() { return IntegerLayout<Marlin>::row(); }

}  // namespace w4q::repack
