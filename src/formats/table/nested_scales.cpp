#include "formats/table/nested_scales.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "formats/table/table_format.h"

namespace w4q::formats {

std::vector<float> nested_table() {
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

void add_nested_planes(int64_t blocks, std::vector<PlaneSpec>& specs) {
  specs.push_back({PlaneRole::nested_scales, DType::f32, {(blocks + nested_block - 1) / nested_block}});
  specs.push_back({PlaneRole::nested_codebook, DType::f32, {nested_entries}});
  specs.push_back({PlaneRole::nested_offset, DType::f32, {1}});
}

float nested_scale(const PackedWeight& canonical, int64_t index) noexcept {
  const auto block = static_cast<size_t>(index);
  const uint8_t entry = canonical.plane(PlaneRole::scales).bytes.as<uint8_t>()[block];
  const float product = canonical.plane(PlaneRole::nested_codebook).bytes.as<float>()[entry] *
                        canonical.plane(PlaneRole::nested_scales).bytes.as<float>()[block / nested_block];
  return product + canonical.plane(PlaneRole::nested_offset).bytes.as<float>()[0];
}

void store_nested(std::span<const float> maxima, PackedWeight& weight) {
  const double sum = std::accumulate(maxima.begin(), maxima.end(), 0.0);
  const auto offset = static_cast<float>(sum / static_cast<double>(maxima.size()));
  const std::vector<float> table = nested_table();
  weight.plane(PlaneRole::nested_offset).bytes.as<float>()[0] = offset;
  std::ranges::copy(table, weight.plane(PlaneRole::nested_codebook).bytes.as<float>().begin());
  std::vector<float> rest(maxima.begin(), maxima.end());
  for (float& value : rest) value -= offset;
  const auto factors = weight.plane(PlaneRole::nested_scales).bytes.as<float>();
  const NearestEntry nearest(table);
  const auto scales = weight.plane(PlaneRole::scales).bytes.as<uint8_t>();
  for (size_t i = 0; i < rest.size(); ++i) {
    float& factor = factors[i / nested_block];
    if (i % nested_block == 0)
      factor = table_max(std::span(rest).subspan(i, std::min<size_t>(nested_block, rest.size() - i)));
    scales[i] = static_cast<uint8_t>(nearest(factor == 0 ? 0.0f : rest[i] / factor));
  }
}

}  // namespace w4q::formats
