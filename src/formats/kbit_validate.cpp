#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/kbit.h"

namespace w4q::formats {
namespace {

void check_scheme(const PackedWeight& weight, std::string_view name) {
  const std::vector<Scheme> known = scheme_row(SchemeFamily::kbit).schemes();
  if (std::ranges::find(known, weight.scheme) == known.end()) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": no such scheme: ", to_string(weight.scheme)));
  }
  check_canonical_layout(weight, name);
}

void check_table(const PackedWeight& weight, std::string_view name) {
  const std::span<const float> table = weight.plane(PlaneRole::codebook).bytes.as<float>();
  const std::string source = concat(name, ": plane codebook");
  check_codebook(table, weight.scheme.bits, source);
  const double largest = static_cast<double>(kbit_table_max(table)) * kbit_scale_max(weight.scheme.scale);
  if (largest <= std::numeric_limits<float>::max()) return;
  throw Error(ErrorCode::bad_file, concat(printable(source), ": entries too large"))
      .detail(concat("the largest, ", kbit_table_max(table), ", times the largest scale leaves the range of fp32"));
}

/// f16 scales are finite and not negative. Every E4M4 byte is a scale.
void check_scales(const PackedWeight& weight, std::string_view name) {
  if (weight.scheme.scale != ScaleType::f16) return;
  constexpr uint16_t infinity = 0x7C00;
  const std::span<const uint16_t> scales = weight.plane(PlaneRole::scales).bytes.as<uint16_t>();
  const auto bad = std::ranges::find_if(scales, [](uint16_t bits) { return bits >= infinity; });
  if (bad == scales.end()) return;
  const int64_t index = bad - scales.begin();
  const int64_t blocks = kbit_blocks(weight.k);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds ",
                                          (*bad & 0x8000) != 0 ? "a negative" : "a non-finite", " value"))
      .detail(
          concat("row ", index / blocks, ", block ", index % blocks, ": ", kbit_decode_scale(*bad, ScaleType::f16)));
}

}  // namespace

void kbit_check_padding(const PackedWeight& weight, std::string_view name) {
  const int64_t last = kbit_blocks(weight.k) - 1;
  const uint32_t padding = ~kbit_lane_mask(weight.k, last);
  if (padding == 0) return;
  const int64_t bits = weight.scheme.bits;
  const std::span<const uint32_t> words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t bit = 0; bit < bits; ++bit) {
      if ((words[static_cast<size_t>((row * (last + 1) + last) * bits + bit)] & padding) == 0) continue;
      throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes has padding bits that are not zero"))
          .detail(concat("row ", row, ", block ", last, ", bit plane ", bit, "; only ", weight.k % kbit_block,
                         " of its 32 lanes hold weights"));
    }
  }
}

void kbit_validate(const PackedWeight& canonical, std::string_view name) {
  check_scheme(canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, kbit_planes(canonical.scheme, canonical.n, canonical.k), name);
  kbit_check_padding(canonical, name);
  check_table(canonical, name);
  check_scales(canonical, name);
}

}  // namespace w4q::formats
