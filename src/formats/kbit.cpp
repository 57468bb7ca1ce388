#include "formats/kbit.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace w4q::formats {

void kbit_midpoints(std::span<const float> codebook, std::span<float> midpoints) noexcept {
  for (size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = (codebook[i] + codebook[i + 1]) * 0.5f;
}

float kbit_table_max(std::span<const float> codebook) noexcept {
  float largest = 0;
  for (float entry : codebook) largest = std::max(largest, std::abs(entry));
  return largest;
}

int kbit_range_exponent(float smallest, float largest, ScaleType type) noexcept {
  const float scale_max = kbit_scale_max(type);
  if (largest == 0 || (largest <= scale_max && smallest >= kbit_scale_min_normal(type))) return 0;
  // Both as fraction · 2^exponent with a fraction in [0.5, 1).
  int scale_exponent = 0;
  int largest_exponent = 0;
  const float scale_fraction = std::frexp(scale_max, &scale_exponent);
  const float largest_fraction = std::frexp(largest, &largest_exponent);
  const int exponent = largest_exponent - scale_exponent + (largest_fraction > scale_fraction ? 1 : 0);
  // Below: entries of a table down to 2^-7 stay normal. Above: the largest scale times 2^exponent stays finite; a block
  // that then lies between scale_max · 2^exponent and the end of fp32 saturates by less than one part in 32.
  constexpr int lowest = std::numeric_limits<float>::min_exponent - 1 + 7;
  return std::clamp(exponent, lowest, std::numeric_limits<float>::max_exponent - scale_exponent);
}

std::vector<float> kbit_scaled_codebook(std::span<const float> table, int exponent) {
  std::vector<float> scaled(table.size());
  std::ranges::transform(table, scaled.begin(), [&](float entry) { return std::ldexp(entry, exponent); });
  return scaled;
}

}  // namespace w4q::formats
