#include "verify/weights/norm_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/convert.h"

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

}  // namespace w4q::verify
