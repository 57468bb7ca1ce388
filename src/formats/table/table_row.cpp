// Rows of the registry for table-coded formats, and how far a value may be off.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/table/group_norm.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

TableFormat format_of(const Scheme& scheme) { return scheme_row(scheme.family).table(scheme); }

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  return table_planes(format_of(scheme), n, k, to_string(scheme));
}

void validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(scheme_row(canonical.scheme.family), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, planes(canonical.scheme, canonical.n, canonical.k), name);
  table_validate(format_of(canonical.scheme), canonical, name);
}

std::optional<float> largest_scale(const PackedWeight& packed, std::string_view name) {
  return table_largest_scale(format_of(packed.scheme), packed, name);
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  table_decode_row(format_of(canonical.scheme), canonical, row, out);
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  PackedWeight weight = allocate_canonical(scheme, n, k);
  table_encode(format_of(scheme), values, codebook, weight);
  return weight;
}

void recode(PackedWeight& weight, std::span<const float> values) {
  table_recode(format_of(weight.scheme), weight, values);
}

double error_bound(const Scheme& scheme, double absmax, std::span<const float> codebook) {
  return table_error_bound(format_of(scheme), absmax, codebook);
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  return table_place(format_of(scheme), k, row, col, bit);
}

}  // namespace

SchemeRow table_row(const TableSchemes& schemes) {
  return {.family = schemes.family,
          .name = schemes.name,
          .description = schemes.description,
          .form = schemes.form,
          .schemes = schemes.schemes,
          .print = schemes.print,
          .parse = schemes.parse,
          .table = schemes.table,
          .planes = planes,
          .validate = validate,
          .largest_scale = largest_scale,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

/// Within the table a value is off by half a gap, times the scale; at its ends by what the rounding of the scale cut
/// off, or by what a saturated scale cannot reach. A norm may be smaller than the block's absmax asks for: beyond the
/// table a value is then off by no more than itself and the distance of the table's end from zero.
double table_error_bound(const TableFormat& format, double absmax, std::span<const float> codebook) {
  if (format.scale == ScaleType::nested || format.tensor_scale) return std::numeric_limits<double>::infinity();
  std::vector<float> sorted(codebook.begin(), codebook.end());
  std::ranges::sort(sorted);
  const double front = sorted.front(), back = sorted.back();
  double gap = 0;
  for (size_t i = 1; i < sorted.size(); ++i) {
    gap = std::max(gap, static_cast<double>(sorted[i]) - static_cast<double>(sorted[i - 1]));
  }
  const ScaleCodec& codec = scale_codec(format.scale);
  const double smallest = codec.decode(1);
  constexpr double subnormal = 0x1p-148;  // products and quotients at the bottom of fp32
  if (format.rule == ScaleRule::group_norm) {
    // In units of the levels, √block taken out: norm / √block, its rounding included.
    const double scale = absmax / rotated_gain(codebook, format.bits) * (1 + codec.roundoff) + smallest;
    const double one_sided = std::max({0.0, front, -back});
    return std::max(0.5 * gap * scale, absmax + one_sided * scale) * (1 + 0x1p-20) + subnormal;
  }
  const double top = format.rule == ScaleRule::absmax ? 1.0 : static_cast<double>(table_max(codebook));
  // A table that ends short of ±top has a one-sided gap there: a value may be off by the whole of it.
  gap = std::max({gap, 2 * (top - back), 2 * (top + front)});
  const double scale = absmax / top * (1 + codec.roundoff) + smallest;
  const double beyond = std::max(0.0, absmax - static_cast<double>(codec.largest) * top);
  return 0.5 * gap * scale + absmax * (codec.roundoff + 0x1p-21) + 0.5 * smallest * top + beyond + subnormal;
}

}  // namespace w4q::formats
