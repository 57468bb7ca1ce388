#include "repack/awq_words.h"
#include "repack/integer_layout.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

struct Awq {
  using Map = AwqMap;
  static constexpr std::string_view name = "awq";
  static constexpr std::string_view description = "AutoAWQ's gemm words: one input of eight outputs, even ones first";
  static constexpr std::string_view reason =
      "AWQ checkpoints stand so; a kernel that takes the low and the high halves of a word finds neighbouring outputs "
      "together";
  static constexpr std::span<const int> sms{};
  static constexpr bool sorts_inputs = false;

  static std::string refuse(const formats::Scheme& scheme) {
    if (scheme.bits != 4) return concat("its words hold eight 4-bit codes, got ", scheme.bits, " bits");
    if (scheme.act_order) return "it has no group_index: inputs belong to groups by their position";
    return {};
  }
  static Shape code_shape(const Map& map, const formats::Scheme&) { return {map.padded_cols, map.row_words()}; }
};

}  // namespace

LayoutRow awq_row() { return IntegerLayout<Awq>::row(); }

}  // namespace w4q::repack
