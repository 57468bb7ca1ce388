#include "formats/scheme_registry.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/exl3.h"
#include "formats/integer.h"
#include "formats/kbit.h"
#include "formats/lut.h"
#include "formats/rotated.h"
#include "formats/small_float.h"
#include "formats/trellis.h"

namespace w4q::formats {

std::span<const SchemeRow> scheme_registry() noexcept {
  static const SchemeRow rows[] = {kbit_row(),    integer_row(), rotated_row(),    lut_row(),
                                   trellis_row(), exl3_row(),    small_float_row()};
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
    Error error(ErrorCode::bad_file, concat(printable(name), ": no such scheme: ", to_string(weight.scheme)));
    if (!row.form.empty()) error.detail(concat("expected ", row.form));
    throw error;
  }
  check_canonical_layout(weight, name);
}

void decode_linear_row(const PackedLinear& linear, int64_t row, std::span<float> out) {
  std::vector<float> pass_values(out.size());
  std::vector<float> sum(out.size());
  std::ranges::fill(out, 0.0f);
  for (size_t first = 0, end = 0; first < linear.passes.size(); first = end) {
    end = shared_input_end(linear, first);
    std::ranges::fill(sum, 0.0f);
    for (size_t pass = first; pass < end; ++pass) {
      const PackedWeight& weight = linear.passes[pass];
      scheme_row(weight.scheme.family).decode_row(weight, row, pass_values);
      for (size_t col = 0; col < sum.size(); ++col) sum[col] += pass_values[col];
    }
    if (!linear.rotations.empty()) linear.rotations[first].restore(sum);
    for (size_t col = 0; col < out.size(); ++col) out[col] += sum[col];
  }
  for (size_t col = 0; col < linear.input_scale.size(); ++col) out[col] /= linear.input_scale[col];
}

void decode_linear_rows(const PackedLinear& linear, int64_t begin, MatrixView<float> out) {
  const bool plain = linear.passes.size() == 1 && linear.rotations.empty() && linear.input_scale.empty();
  const auto decode_rows = scheme_row(linear.passes.front().scheme.family).decode_rows;
  if (plain && decode_rows != nullptr) return decode_rows(linear.passes.front(), begin, out);
  for (int64_t r = 0; r < out.rows; ++r) {
    decode_linear_row(linear, begin + r, {out.row(r), static_cast<size_t>(out.cols)});
  }
}

PackedWeight allocate_canonical(const Scheme& scheme, int64_t n, int64_t k) {
  return allocate_planes(scheme, canonical_layout, n, k, scheme_row(scheme.family).planes(scheme, n, k));
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
