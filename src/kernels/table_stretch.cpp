#include "kernels/table_stretch.h"

#include <cmath>
#include <vector>

#include "core/float_formats.h"
#include "formats/kbit.h"

namespace w4q::kernels {
namespace {

constexpr int factors = 1024;

/// Squares of what rounding takes from values of `table` times `factor`, in units of the table.
double rounding(std::span<const float> table, float factor) {
  double sum = 0;
  for (const float entry : table) {
    const float value = entry * factor;
    const double lost = (double{f32_from_f16(f16_from_f32(value))} - value) / factor;
    sum += lost * lost;
  }
  return sum;
}

}  // namespace

float table_stretch(std::span<const float> table) {
  // Small entries must not be subnormal: a power of two changes nothing else.
  const float largest = formats::kbit_table_max(table);
  if (largest == 0) return 1;
  std::vector<float> scaled(table.begin(), table.end());
  for (float& entry : scaled) entry = std::ldexp(entry, 10 - std::ilogb(largest));
  float best = 1;
  double least = rounding(scaled, best);
  for (int i = 1; i < factors && least > 0; ++i) {
    const float factor = 1 + static_cast<float>(i) / factors;
    const double lost = rounding(scaled, factor);
    if (lost < least) least = lost, best = factor;
  }
  return best;
}

float table_factor(float largest, float stretch, int top) noexcept {
  return std::ldexp(stretch, top - std::ilogb(largest * stretch));
}

}  // namespace w4q::kernels
