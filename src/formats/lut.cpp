#include "formats/lut.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

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

void check_padding(const PackedWeight& weight, std::string_view name) {
  const int64_t rest = weight.n * weight.k % 8;
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  if (rest == 0 || words.back() >> (rest * lut_bits) == 0) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes has padding bits that are not zero"))
      .detail(concat("word ", words.size() - 1, ": only ", rest, " of its 8 codes are weights"));
}

/// All values of a plane of floats are finite; returns the largest magnitude.
float check_finite(const PackedWeight& weight, PlaneRole role, std::string_view name) {
  float largest = 0;
  const auto values = weight.plane(role).bytes.as<float>();
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      throw Error(ErrorCode::bad_file,
                  concat(printable(name), ": plane ", to_string(role), " holds a value that is not finite"))
          .detail(concat("entry ", i, ": ", values[i]));
    }
    largest = std::max(largest, std::abs(values[i]));
  }
  return largest;
}

/// No weight may decode to infinity: the bound is the largest table entry times the largest scale there can be.
void check_range(double table, double scale, std::string_view name) {
  if (table * scale <= static_cast<double>(std::numeric_limits<float>::max())) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds a value that is too large"))
      .detail(concat("scales up to ", scale, " times table entries up to ", table, " leave the range of fp32"));
}

}  // namespace

const std::array<float, lut_entries>& nf4_table() noexcept { return nf4; }
const std::array<float, lut_entries>& fp4_table() noexcept { return fp4; }

std::vector<float> lut_nested_table() {
  std::vector<float> table = {0.0f, 1.0f};
  for (int exponent = 0; exponent < 7; ++exponent) {
    const int points = 1 << exponent;
    const double step = 0.9 / points;
    for (int i = 0; i < points; ++i) {
      const double middle = 0.1 + step * (i + 0.5);
      const auto value = static_cast<float>(middle * std::pow(10.0, exponent - 6));
      table.push_back(value);
      table.push_back(-value);
    }
  }
  std::ranges::sort(table);
  return table;
}

bool is_lut_block(int block) noexcept { return block >= 32 && block <= 4096 && (block & (block - 1)) == 0; }

std::vector<PlaneSpec> lut_planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  const int64_t blocks = lut_blocks(scheme, n, k);
  const bool nested = scheme.scale == ScaleType::nested;
  std::vector<PlaneSpec> specs = {{PlaneRole::codes, DType::i32, {(n * k + 7) / 8}},
                                  {PlaneRole::scales, nested ? DType::u8 : DType::f32, {blocks}},
                                  {PlaneRole::codebook, DType::f32, {lut_entries}}};
  if (!nested) return specs;
  specs.push_back({PlaneRole::nested_scales, DType::f32, {(blocks + lut_nested_block - 1) / lut_nested_block}});
  specs.push_back({PlaneRole::nested_codebook, DType::f32, {lut_nested_entries}});
  specs.push_back({PlaneRole::nested_offset, DType::f32, {1}});
  return specs;
}

float lut_scale(const PackedWeight& canonical, int64_t block) noexcept {
  const auto index = static_cast<size_t>(block);
  const Plane& scales = canonical.plane(PlaneRole::scales);
  if (canonical.scheme.scale != ScaleType::nested) return scales.bytes.as<float>()[index];
  const float product =
      canonical.plane(PlaneRole::nested_codebook).bytes.as<float>()[scales.bytes.as<uint8_t>()[index]] *
      canonical.plane(PlaneRole::nested_scales).bytes.as<float>()[index / lut_nested_block];
  return product + canonical.plane(PlaneRole::nested_offset).bytes.as<float>()[0];
}

void lut_validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(scheme_row(SchemeFamily::lut), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, lut_planes(canonical.scheme, canonical.n, canonical.k), name);
  check_padding(canonical, name);
  const double table = check_finite(canonical, PlaneRole::codebook, name);
  if (canonical.scheme.scale != ScaleType::nested) {
    check_range(table, check_finite(canonical, PlaneRole::scales, name), name);
    return;
  }
  const double factor = check_finite(canonical, PlaneRole::nested_scales, name);
  const double entry = check_finite(canonical, PlaneRole::nested_codebook, name);
  const double offset = check_finite(canonical, PlaneRole::nested_offset, name);
  check_range(std::max(1.0, table), factor * entry + offset, name);
}

}  // namespace w4q::formats
