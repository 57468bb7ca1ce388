#include "formats/lut.h"

#include <optional>

#include "core/text.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

constexpr std::string_view form = "lut4-b{32,64,128,256,512,1024,2048,4096}-{f32,nested}; nf4 and nf4-nested have b64";

constexpr std::array<float, lut_entries> nf4 = {-1.0f,
                                                -0.69619280099868770f,
                                                -0.52507305145263670f,
                                                -0.39491748809814453f,
                                                -0.28444138169288635f,
                                                -0.18477343022823334f,
                                                -0.09105003625154495f,
                                                0.0f,
                                                0.07958029955625534f,
                                                0.16093020141124725f,
                                                0.24611230194568634f,
                                                0.33791524171829224f,
                                                0.44070982933044434f,
                                                0.56261700391769410f,
                                                0.72295683622360230f,
                                                1.0f};

constexpr std::array<float, lut_entries> fp4 = [] {
  constexpr float twelfths[] = {0.0f, 0.0625f, 8.0f, 12.0f, 4.0f, 6.0f, 2.0f, 3.0f};
  std::array<float, lut_entries> table{};
  for (size_t i = 0; i < 8; ++i) {
    table[i] = twelfths[i] / 12.0f;
    table[i + 8] = -table[i];
  }
  return table;
}();

std::vector<Scheme> representative_schemes() {
  return {{SchemeFamily::lut, lut_bits, 64, ScaleType::f32},
          {SchemeFamily::lut, lut_bits, 64, ScaleType::nested},
          {SchemeFamily::lut, lut_bits, 128, ScaleType::f32}};
}

std::string print(const Scheme& scheme) {
  return concat("lut", scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

std::optional<Scheme> parse(std::string_view text) {
  if (text == "nf4") return Scheme{SchemeFamily::lut, lut_bits, 64, ScaleType::f32};
  if (text == "nf4-nested") return Scheme{SchemeFamily::lut, lut_bits, 64, ScaleType::nested};
  for (int block = 32; is_lut_block(block); block *= 2) {
    for (const ScaleType scale : {ScaleType::f32, ScaleType::nested}) {
      const Scheme scheme{SchemeFamily::lut, lut_bits, block, scale};
      if (print(scheme) == text) return scheme;
    }
  }
  return std::nullopt;
}

/// bitsandbytes multiplies by the reciprocal, rounded, of the scale.
TableFormat table(const Scheme& scheme) {
  return {.bits = scheme.bits,
          .order = CodeOrder::dense,
          .ascending = false,
          .block = scheme.block,
          .scale = scheme.scale,
          .rule = ScaleRule::absmax,
          .reciprocal = true};
}

}  // namespace

const std::array<float, lut_entries>& nf4_table() noexcept { return nf4; }
const std::array<float, lut_entries>& fp4_table() noexcept { return fp4; }

bool is_lut_block(int block) noexcept { return block >= 32 && block <= 4096 && (block & (block - 1)) == 0; }

SchemeRow lut_row() {
  return table_row({.family = SchemeFamily::lut,
                    .name = "lut",
                    .description = "4-bit codes of a table, flat blocks: bitsandbytes' NF4 and FP4",
                    .form = form,
                    .schemes = representative_schemes,
                    .print = print,
                    .parse = parse,
                    .table = table});
}

}  // namespace w4q::formats
