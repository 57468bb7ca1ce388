#include "repack/gptq_words.h"
#include "repack/integer_layout.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

struct Gptq {
  using Map = GptqMap;
  static constexpr std::string_view name = "gptq";
  static constexpr std::string_view description = "GPTQ's words: every output's stream of codes down a column";
  static constexpr std::string_view reason =
      "GPTQ checkpoints stand so; an output's words are a column, neighbouring outputs neighbouring words";
  static constexpr std::span<const int> sms{};
  static constexpr bool sorts_inputs = false;

  static std::string refuse(const formats::Scheme& scheme) {
    if (scheme.bits < 5 || scheme.bits == 8) return {};
    return concat("its words hold 2, 3, 4 and 8 bits, got ", scheme.bits);
  }
  static Shape code_shape(const Map& map, const formats::Scheme&) { return {map.row_words(), map.padded_rows}; }
};

}  // namespace

LayoutRow gptq_row() { return IntegerLayout<Gptq>::row(); }

}  // namespace w4q::repack
