#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

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

void check_scales(const PackedWeight& weight, std::string_view name) {
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

void check_zeros(const PackedWeight& weight, std::string_view name) {
  if (!weight.scheme.asymmetric) return;
  const int largest = integer_largest_zero(weight.scheme.bits);
  const auto zeros = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto bad = std::ranges::find_if(zeros, [&](uint8_t zero) { return zero > largest; });
  if (bad == zeros.end()) return;
  const int64_t index = bad - zeros.begin();
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane zeros holds a zero point out of range"))
      .detail(concat("row ", index / groups, ", group ", index % groups, ": expected 0 … ", largest, ", got ", +*bad));
}

void check_group_index(const PackedWeight& weight, std::string_view name) {
  if (!weight.scheme.act_order) return;
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  const auto bad = std::ranges::find_if(index, [&](int32_t group) { return group < 0 || group >= groups; });
  if (bad == index.end()) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane group_index names a group that does not exist"))
      .detail(concat("input ", bad - index.begin(), ": expected 0 … ", groups - 1, ", got ", *bad));
}

}  // namespace

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
