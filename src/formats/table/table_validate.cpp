// What a hostile file could get wrong in the planes of a table-coded format.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "formats/bit_stream.h"
#include "formats/codebook.h"
#include "formats/scale_codec.h"
#include "formats/scale_range.h"
#include "formats/small_float.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

Error padding_error(std::string_view name) {
  return {ErrorCode::bad_file, concat(printable(name), ": plane codes has padding bits that are not zero")};
}

/// The lanes behind the last weight of every row hold zero bits.
void check_plane_padding(const PackedWeight& weight, int64_t bits, std::string_view name) {
  const int64_t lanes = weight.k % 32, units = (weight.k + 31) / 32;
  if (lanes == 0) return;
  const uint32_t padding = ~0u << lanes;
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t bit = 0; bit < bits; ++bit) {
      if ((words[static_cast<size_t>(((row + 1) * units - 1) * bits + bit)] & padding) == 0) continue;
      throw padding_error(name).detail(concat("row ", row, ", block ", units - 1, ", bit plane ", bit, "; only ", lanes,
                                              " of its 32 lanes hold weights"));
    }
  }
}

void check_stream_padding(const PackedWeight& weight, int bits, std::string_view name) {
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  if ((words.back() & dense_unused_bits(weight.n * weight.k, bits)) == 0) return;
  const int per_word = 32 / bits;
  throw padding_error(name).detail(concat("word ", words.size() - 1, ": only ", weight.n * weight.k % per_word,
                                          " of its ", per_word, " codes are weights"));
}

void check_finite(const PackedWeight& weight, PlaneRole role, std::string_view name) {
  const auto values = weight.plane(role).bytes.as<float>();
  const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  if (bad == values.end()) return;
  throw Error(ErrorCode::bad_file,
              concat(printable(name), ": plane ", to_string(role), " holds a value that is not finite"))
      .detail(concat("entry ", bad - values.begin(), ": ", *bad));
}

void check_fixed(const TableFormat& format, const PackedWeight& weight, std::string_view name) {
  const auto table = weight.plane(PlaneRole::codebook).bytes.as<float>();
  const auto same = [](float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); };
  const auto [found, expected] = std::ranges::mismatch(table, format.fixed, same);
  if (found == table.end()) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codebook is not the table of the float"))
      .detail(concat("entry ", found - table.begin(), ": expected ", *expected, ", got ", *found));
}

/// Of 8-bit floats: no code is a NaN.
void check_no_nan(const PackedWeight& weight, std::string_view name) {
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const int64_t units = (weight.k + 31) / 32;
  for (size_t unit = 0; unit < words.size() / 8; ++unit) {
    uint32_t nan = ~0u;
    for (size_t bit = 0; bit < 7; ++bit) nan &= words[unit * 8 + bit];
    if (nan == 0) continue;
    const auto index = static_cast<int64_t>(unit);
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes holds a NaN of E4M3"))
        .detail(concat("row ", index / units, ", column ", index % units * 32 + std::countr_zero(nan)));
  }
}

void check_table(const TableFormat& format, const PackedWeight& weight, std::string_view name) {
  if (!format.fixed.empty()) return check_fixed(format, weight, name);
  if (!format.ascending) return check_finite(weight, PlaneRole::codebook, name);
  const auto table = weight.plane(PlaneRole::codebook).bytes.as<float>();
  const std::string source = concat(name, ": plane codebook");
  check_codebook(table, format.bits, source);
  if (format.rule != ScaleRule::absmax_over_table) return;
  const float largest = table_max(table);
  if (std::isfinite(largest * scale_codec(format.scale).largest)) return;
  throw Error(ErrorCode::bad_file, concat(printable(source), ": entries too large"))
      .detail(concat("the largest, ", largest, ", times the largest scale leaves the range of fp32"));
}

/// What is wrong with a scale; empty: nothing. `largest` is the table's largest magnitude.
std::string_view fault(const TableFormat& format, float scale, float largest) noexcept {
  if (!std::isfinite(scale)) return "a non-finite value";
  if (std::signbit(scale) && format.rule != ScaleRule::absmax) return "a negative value";
  return std::isfinite(largest * scale) ? "" : "a value that is too large";
}

/// Whether all scales are sound, and the largest.
std::optional<float> sound_range(const TableFormat& format, const Plane& scales, float largest) {
  const ScaleRange range = scale_range(scales, format.scale);
  // What holds for the one that is farthest from zero holds for all.
  if (!fault(format, range.negative ? -range.largest : range.largest, largest).empty()) return std::nullopt;
  return range.largest;
}

void check_scales(const TableFormat& format, const PackedWeight& weight, float largest, std::string_view name) {
  const Plane& scales = weight.plane(PlaneRole::scales);
  if (sound_range(format, scales, largest)) return;
  const Shape& shape = scales.spec.shape;
  const int64_t count = element_count(shape);
  std::array<float, 1024> piece;
  for (int64_t first = 0; first < count; first += std::ssize(piece)) {
    const auto values = std::span(piece).first(static_cast<size_t>(std::min(std::ssize(piece), count - first)));
    load_scales(scales, static_cast<size_t>(first), values);
    const auto bad = std::ranges::find_if(values, [&](float scale) { return !fault(format, scale, largest).empty(); });
    if (bad == values.end()) continue;
    const int64_t index = first + (bad - values.begin());
    const std::string row = shape.size() == 1 ? "" : concat("row ", index / shape.back(), ", ");
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds ", fault(format, *bad, largest)))
        .detail(concat(row, "block ", index % shape.back(), ": ", *bad, "; table entries go up to ", largest,
                       ", and products stay within fp32"));
  }
}

/// No weight may decode to infinity: the bound is the largest table entry times the largest scale there can be.
void check_nested(const PackedWeight& weight, double largest, std::string_view name) {
  const auto magnitude = [&](PlaneRole role) {
    check_finite(weight, role, name);
    return static_cast<double>(table_max(weight.plane(role).bytes.as<float>()));
  };
  const double factor = magnitude(PlaneRole::nested_scales), entry = magnitude(PlaneRole::nested_codebook);
  const double scale = factor * entry + magnitude(PlaneRole::nested_offset);
  if (std::max(1.0, largest) * scale <= static_cast<double>(std::numeric_limits<float>::max())) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds a value that is too large"))
      .detail(concat("scales up to ", scale, " times table entries up to ", largest, " leave the range of fp32"));
}

/// Whether no code of the type is refused: E4M4 has neither sign nor infinity, and check_table knows its largest.
bool every_scale_is_sound(const TableFormat& format) noexcept {
  return format.scale == ScaleType::e4m4 && format.rule == ScaleRule::absmax_over_table;
}

void check_tensor_scale(const PackedWeight& weight, std::string_view name) {
  const float factor = weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0];
  if (std::isnormal(factor) && factor > 0) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane tensor_scale holds ", factor))
      .detail("expected a positive normal number");
}

/// What is not padding and not scales; the table's largest magnitude.
float checked_table(const TableFormat& format, const PackedWeight& weight, std::string_view name) {
  check_table(format, weight, name);
  if (format.tensor_scale) check_tensor_scale(weight, name);
  const float largest = table_max(table_levels(format, weight));
  if (!format.tensor_scale) return largest;
  return scale_with_factor(largest, weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0], format.tensor_divides);
}

}  // namespace

std::optional<float> table_largest_scale(const TableFormat& format, const PackedWeight& packed, std::string_view name) {
  const float largest = checked_table(format, packed, name);
  if (format.scale == ScaleType::nested) return std::nullopt;
  return sound_range(format, packed.plane(PlaneRole::scales), largest);
}

void table_validate(const TableFormat& format, const PackedWeight& canonical, std::string_view name) {
  if (format.order == CodeOrder::bit_planes) {
    check_plane_padding(canonical, format.bits, name);
  } else {
    check_stream_padding(canonical, format.bits, name);
  }
  if (format.fixed.size() == 256) check_no_nan(canonical, name);
  const float largest = checked_table(format, canonical, name);
  if (format.scale == ScaleType::nested) return check_nested(canonical, largest, name);
  if (!every_scale_is_sound(format)) check_scales(format, canonical, largest, name);
}

}  // namespace w4q::formats
