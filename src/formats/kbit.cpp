#include "formats/kbit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/text.h"

namespace w4q::formats {
namespace {

std::vector<Scheme> all_schemes() {
  std::vector<Scheme> schemes;
  for (const ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
    for (int bits = table_min_bits; bits <= table_max_bits; ++bits) {
      schemes.push_back({SchemeFamily::kbit, bits, kbit_block, scale});
    }
  }
  return schemes;
}

std::string print(const Scheme& scheme) {
  return concat("kbit", scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

std::optional<Scheme> parse(std::string_view text) {
  for (const Scheme& scheme : all_schemes()) {
    if (print(scheme) == text) return scheme;
  }
  return std::nullopt;
}

TableFormat table(const Scheme& scheme) { return {.bits = scheme.bits, .block = scheme.block, .scale = scheme.scale}; }

}  // namespace

void kbit_midpoints(std::span<const float> codebook, std::span<float> midpoints) noexcept {
  for (size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = (codebook[i] + codebook[i + 1]) * 0.5f;
}

int kbit_range_exponent(float smallest, float largest, ScaleType type) noexcept {
  const ScaleCodec& codec = scale_codec(type);
  if (largest == 0 || (largest <= codec.largest && smallest >= codec.smallest_normal)) return 0;
  // Both as fraction · 2^exponent with a fraction in [0.5, 1).
  int scale_exponent = 0;
  int largest_exponent = 0;
  const float scale_fraction = std::frexp(codec.largest, &scale_exponent);
  const float largest_fraction = std::frexp(largest, &largest_exponent);
  const int exponent = largest_exponent - scale_exponent + (largest_fraction > scale_fraction ? 1 : 0);
  // Below: entries of a table down to 2^-7 stay normal. Above: the largest scale times 2^exponent stays finite; a block
  // that then lies between the largest scale · 2^exponent and the end of fp32 saturates by less than one part in 32.
  constexpr int lowest = std::numeric_limits<float>::min_exponent - 1 + 7;
  return std::clamp(exponent, lowest, std::numeric_limits<float>::max_exponent - scale_exponent);
}

std::vector<float> kbit_scaled_codebook(std::span<const float> table, int exponent) {
  std::vector<float> scaled(table.size());
  std::ranges::transform(table, scaled.begin(), [&](float entry) { return std::ldexp(entry, exponent); });
  return scaled;
}

SchemeRow kbit_row() {
  return table_row({.family = SchemeFamily::kbit,
                    .name = "kbit",
                    .description = "2 to 5 bit codes of a table, 32 weights to a scale",
                    .form = {},
                    .schemes = all_schemes,
                    .print = print,
                    .parse = parse,
                    .table = table});
}

}  // namespace w4q::formats
