#include "kernels/common/table_stretch.h"

#include <cmath>

#include "core/float_formats.h"
#include "formats/kbit.h"

namespace w4q::kernels {
namespace {

double as_f16(double value) { return double{f32_from_f16(f16_from_f32(static_cast<float>(value)))}; }

/// Squares of what rounding takes from an entry times `factor`, in units of the table.
double entry_loss(float entry, float factor) {
  const double lost = (as_f16(entry * factor) - double{entry} * factor) / factor;
  return lost * lost;
}
/// … and from its products with mantissas of E4M4, over these.
double product_loss(float entry, float factor) {
  const double held = as_f16(entry * factor);
  double sum = 0;
  for (int m = 16; m < 32; ++m) {
    const double mantissa = m / 16.0;
    const double lost = as_f16(held * mantissa) / mantissa / factor - double{entry};
    sum += lost * lost;
  }
  return sum;
}

template <class Loss>
float best_stretch(std::span<const float> table, int factors, const Loss& loss) {
  // Small entries must not be subnormal: a power of two changes nothing else.
  const float largest = formats::table_max(table);
  if (largest == 0) return 1;
  const auto of_table = [&](float factor) {
    double sum = 0;
    for (const float entry : table) sum += loss(std::ldexp(entry, 10 - std::ilogb(largest)), factor);
    return sum;
  };
  float best = 1;
  double least = of_table(best);
  for (int i = 1; i < factors && least > 0; ++i) {
    const float factor = 1 + static_cast<float>(i) / static_cast<float>(factors);
    const double lost = of_table(factor);
    if (lost < least) least = lost, best = factor;
  }
  return best;
}

}  // namespace

float table_stretch(std::span<const float> table) { return best_stretch(table, 1024, entry_loss); }

float product_stretch(std::span<const float> table) { return best_stretch(table, 64, product_loss); }

float table_factor(float largest, float stretch, int top) noexcept {
  return std::ldexp(stretch, top - std::ilogb(largest * stretch));
}

}  // namespace w4q::kernels
