#include "formats/rotated.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <optional>

#include "core/text.h"
#include "formats/codebook.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

constexpr int min_block = 32;
constexpr int max_block = 1 << 16;
constexpr std::string_view form = "rotated<2 to 5>-<d32 | d64 | d128 | … | row>[-e4m4 | -f32]; norms are f16 otherwise";

bool is_block(int block) noexcept {
  return block == whole_row ||
         (block >= min_block && block <= max_block && std::has_single_bit(static_cast<unsigned>(block)));
}

std::vector<Scheme> representative_schemes() {
  const auto scheme = [](int bits, int block, ScaleType scale) {
    return Scheme{SchemeFamily::rotated, bits, block, scale};
  };
  return {scheme(2, 128, ScaleType::f16),       scheme(3, 128, ScaleType::f16), scheme(4, 128, ScaleType::f16),
          scheme(5, 128, ScaleType::f16),       scheme(4, 32, ScaleType::e4m4), scheme(3, 64, ScaleType::e4m4),
          scheme(4, whole_row, ScaleType::f16), scheme(4, 128, ScaleType::f32)};
}

std::string print(const Scheme& scheme) {
  const std::string group = scheme.block == whole_row ? "row" : concat("d", scheme.block);
  const std::string norm = scheme.scale == ScaleType::f16 ? "" : concat("-", to_string(scheme.scale));
  return concat("rotated", scheme.bits, "-", group, norm);
}

/// The block of "d128" or "row"; -1 for anything else.
int parse_block(std::string_view text) noexcept {
  if (text == "row") return whole_row;
  if (text.size() < 3 || text.front() != 'd' || text[1] == '0') return -1;
  int block = 0;
  const auto [stop, error] = std::from_chars(text.data() + 1, text.data() + text.size(), block);
  const bool whole = error == std::errc{} && stop == text.data() + text.size();
  return whole && block != whole_row && is_block(block) ? block : -1;
}

std::optional<Scheme> parse(std::string_view text) {
  constexpr std::string_view prefix = "rotated";
  if (!text.starts_with(prefix) || text.size() < prefix.size() + 3) return std::nullopt;
  Scheme scheme{SchemeFamily::rotated, text[prefix.size()] - '0', 0, ScaleType::f16};
  if (scheme.bits < table_min_bits || scheme.bits > table_max_bits || text[prefix.size() + 1] != '-')
    return std::nullopt;
  std::string_view rest = text.substr(prefix.size() + 2);
  for (const ScaleType type : {ScaleType::e4m4, ScaleType::f32}) {
    const std::string suffix = concat("-", to_string(type));
    if (!rest.ends_with(suffix)) continue;
    scheme.scale = type;
    rest.remove_suffix(suffix.size());
    break;
  }
  scheme.block = parse_block(rest);
  if (scheme.block < 0) return std::nullopt;
  return scheme;
}

TableFormat table(const Scheme& scheme) {
  return {.bits = scheme.bits, .block = scheme.block, .scale = scheme.scale, .rule = ScaleRule::group_norm};
}

}  // namespace

SchemeRow rotated_row() {
  return table_row(
      {.family = SchemeFamily::rotated,
       .name = "rotated",
       .description = "2 to 5 bit codes of a table for N(0, 1), a norm per group; for weights of a rotated input",
       .form = form,
       .schemes = representative_schemes,
       .print = print,
       .parse = parse,
       .table = table});
}

}  // namespace w4q::formats
