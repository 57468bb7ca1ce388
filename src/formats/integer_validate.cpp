#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/scale_range.h"

namespace w4q::formats {
namespace {

/// The bits behind the last code of a row are zero.
void check_padding(const PackedWeight& weight, std::string_view name) {
  const uint32_t unused = dense_unused_bits(weight.k, weight.scheme.bits);
  if (unused == 0) return;
  const int64_t row_words = dense_words(weight.k, weight.scheme.bits);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (int64_t row = 0; row < weight.n; ++row) {
    if ((words[static_cast<size_t>((row + 1) * row_words - 1)] & unused) == 0) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes has padding bits that are not zero"))
        .detail(concat("row ", row, ", word ", row_words - 1, ", behind the last of ", weight.k, " codes"));
  }
}

/// Whether all scales are in range, and the largest.
std::optional<float> sound_range(const PackedWeight& weight) {
  const float largest = scale_range(weight.plane(PlaneRole::scales), weight.scheme.scale).largest;
  if (!(largest <= integer_scale_max(weight.scheme))) return std::nullopt;
  return largest;
}

void check_scales(const PackedWeight& weight, std::string_view name) {
  if (sound_range(weight)) return;
  const float largest = integer_scale_max(weight.scheme);
  std::vector<float> scales(static_cast<size_t>(integer_groups(weight.scheme, weight.k)));
  for (int64_t row = 0; row < weight.n; ++row) {
    integer_read_scales(weight, row, scales);
    const auto bad = std::ranges::find_if(scales, [&](float scale) { return !(std::abs(scale) <= largest); });
    if (bad == scales.end()) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds a value that is ",
                                            std::isfinite(*bad) ? "too large" : "not finite"))
        .detail(concat("row ", row, ", group ", bad - scales.begin(), ": ", *bad, "; the largest is ", largest));
  }
}

/// The first zero point that is out of range, or nothing. Those of other layouts are as wide as codes.
std::optional<int64_t> stray_zero(const PackedWeight& weight) {
  if (!weight.scheme.asymmetric || weight.layout != canonical_layout) return std::nullopt;
  const auto zeros = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const int largest = integer_largest_zero(weight.scheme.bits);
  const auto bad = std::ranges::find_if(zeros, [&](uint8_t zero) { return zero > largest; });
  if (bad == zeros.end()) return std::nullopt;
  return bad - zeros.begin();
}

void check_zeros(const PackedWeight& weight, std::string_view name) {
  const auto stray = stray_zero(weight);
  if (!stray) return;
  const int64_t index = *stray;
  const int largest = integer_largest_zero(weight.scheme.bits);
  const int zero = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[static_cast<size_t>(index)];
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane zeros holds a zero point out of range"))
      .detail(concat("row ", index / groups, ", group ", index % groups, ": expected 0 … ", largest, ", got ", zero));
}

/// The first input whose group does not exist, or k.
int64_t stray_input(const PackedWeight& weight) {
  if (!weight.scheme.act_order) return weight.k;
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  const auto stray = [&](int32_t group) { return group < 0 || group >= groups; };
  return std::ranges::find_if(index, stray) - index.begin();
}

void check_group_index(const PackedWeight& weight, std::string_view name) {
  const int64_t input = stray_input(weight);
  if (input == weight.k) return;
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane group_index names a group that does not exist"))
      .detail(concat("input ", input, ": expected 0 … ", groups - 1, ", got ", index[static_cast<size_t>(input)]));
}

}  // namespace

std::optional<float> integer_largest_scale(const PackedWeight& packed, std::string_view) {
  const bool sound = stray_input(packed) == packed.k && !stray_zero(packed);
  return sound ? sound_range(packed) : std::nullopt;
}

void integer_validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(scheme_row(SchemeFamily::integer), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, integer_planes(canonical.scheme, canonical.n, canonical.k), name);
  check_padding(canonical, name);
  check_scales(canonical, name);
  check_zeros(canonical, name);
  check_group_index(canonical, name);
}

}  // namespace w4q::formats
