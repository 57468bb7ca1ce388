#include "formats/scheme_registry.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/kbit.h"
#include "formats/lut.h"

namespace w4q::formats {

std::span<const SchemeRow> scheme_registry() noexcept {
  static const SchemeRow rows[] = {kbit_row(), integer_row(), lut_row()};
  return rows;
}

const SchemeRow& scheme_row(SchemeFamily family) noexcept {
  const std::span<const SchemeRow> rows = scheme_registry();
  for (const SchemeRow& row : rows) {
    if (row.family == family) return row;
  }
  return rows.front();
}

void check_canonical(const SchemeRow& row, const PackedWeight& weight, std::string_view name) {
  if (row.parse(row.print(weight.scheme)) != weight.scheme) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": no such scheme: ", to_string(weight.scheme)))
        .detail(concat("expected ", row.form));
  }
  check_canonical_layout(weight, name);
}

double bits_per_weight_of_planes(std::span<const PlaneSpec> planes, int64_t n, int64_t k) {
  double bits = 0;
  for (const PlaneSpec& spec : planes) bits += 8.0 * static_cast<double>(byte_count(spec.dtype, spec.shape));
  return bits / (static_cast<double>(n) * static_cast<double>(k));
}

void check_values(std::span<const float> values, int64_t n, int64_t k) {
  check_dimensions(n, k, "encode");
  if (values.size() != static_cast<size_t>(n * k)) {
    throw Error(ErrorCode::bad_argument, "encode: wrong number of values")
        .detail(concat("expected ", n, " × ", k, ", got ", values.size()));
  }
  const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  if (bad == values.end()) return;
  const int64_t index = bad - values.begin();
  throw Error(ErrorCode::bad_argument,
              concat("encode: value at row ", index / k, ", column ", index % k, " is not finite"));
}

}  // namespace w4q::formats
