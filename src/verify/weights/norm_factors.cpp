#include "verify/weights/norm_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/convert.h"
#include "core/text.h"
#include "verify/weights/base_values.h"

namespace w4q::verify {
namespace {

/// Of rounding a norm to 8 bits.
constexpr double known_to = 1.0 / 256;
/// One rounding is that of the sum w + offset, another one that of the stored number: programs fold in 16 bit.
constexpr double roundings = 2;
/// Nobody folds more into a channel: what is nothing now was lost.
constexpr double most_factor = 0x1p20;

NormFactor factor_of(double is, double was, double half) {
  constexpr float unbounded = std::numeric_limits<float>::infinity();
  const double rounding = roundings * half;
  // A channel that was nothing is nothing, whatever its readers were multiplied by.
  if (was == 0) return {.least = 0, .most = unbounded, .known = false, .possible = std::abs(is) <= rounding};
  const double sign = was < 0 ? -1 : 1, size = is * sign;
  if (!(most_factor * (size + rounding) > std::abs(was))) return {.possible = false};
  NormFactor result{.least = static_cast<float>(was * sign / (size + rounding)),
                    .most = size > rounding ? static_cast<float>(was * sign / (size - rounding)) : unbounded,
                    .known = half <= known_to * std::abs(size)};
  result.factor = size > 0 ? static_cast<float>(was / is) : result.least;
  return result;
}

}  // namespace

double half_unit(double value, DType dtype) noexcept {
  const int digits = dtype == DType::bf16 ? 8 : dtype == DType::f16 ? 11 : 24;
  const int least = dtype == DType::f16 ? -13 : -125;
  int exponent = least;
  if (value != 0) std::frexp(value, &exponent);
  return std::ldexp(0.5, std::max(exponent, least) - digits);
}

float NormFactor::nearest(float measured) const noexcept {
  return measured > 0 ? std::clamp(measured, least, most) : factor;
}

std::vector<NormFactor> norm_factors(const TensorView& ours, const TensorView& theirs, float offset) {
  const auto size = static_cast<size_t>(element_count(ours.shape));
  std::vector<float> a(size), b(size);
  widen(ours.bytes, ours.dtype, a);
  widen(theirs.bytes, theirs.dtype, b);
  std::vector<NormFactor> factors;
  factors.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    factors.push_back(
        factor_of(double{a[i]} + double{offset}, double{b[i]} + double{offset}, half_unit(a[i], ours.dtype)));
  }
  return factors;
}

std::string factors_fault(const TensorView& ours, const TensorView& theirs, float offset) {
  double least = INFINITY, most = 0;
  bool all_known = true;
  const int64_t size = element_count(ours.shape);
  const auto a = values_of(ours, 0, size), b = values_of(theirs, 0, size);
  const auto next_to_nothing = [&](float stored) { return std::abs(stored + offset) < 1e-6f; };
  const auto factors = norm_factors(ours, theirs, offset);
  for (size_t i = 0; i < factors.size(); ++i) {
    // What is next to nothing in a 16-bit type has no factor that could be told.
    if (next_to_nothing(a[i]) && next_to_nothing(b[i])) continue;
    if (!factors[i].possible) return concat("no positive factor in channel ", i);
    all_known = all_known && factors[i].known;
    if (!factors[i].known) continue;
    const double factor = 1 / double{factors[i].factor};
    least = std::min(least, factor), most = std::max(most, factor);
  }
  // Folding makes channels alike; what is the same in all changes nothing but the size of what is computed. Distillation
  // may leave all as good as they were.
  constexpr double hardly = 1.02;
  if (all_known && most < least * hardly && (least * hardly < 1 || most > hardly))
    return concat("the same factor in all channels (", fixed(least, 3), "): nothing that is folded");
  return {};
}

}  // namespace w4q::verify
