// Codes without division: for a scale d and a midpoint m there is a largest value t of the weights' type with
// fp32(t / d) <= m, because the rounded quotient is monotonic in the dividend. So `x / d > m` is exactly `x > t`, and
// the thresholds of a scale are all that choosing codes needs. For the host too, so that every table can be proved.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace w4q::quantize {

namespace detail {

/// Floats in their order as integers; ±0 share one.
W4Q_HOST_DEVICE constexpr int32_t float_order(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  return (bits >> 31) != 0 ? -magnitude : magnitude;
}

/// The inverse; never -0.
W4Q_HOST_DEVICE constexpr float float_from_order(int32_t order) noexcept {
  return std::bit_cast<float>(order < 0 ? 0x80000000u | static_cast<uint32_t>(-order) : static_cast<uint32_t>(order));
}

}  // namespace detail

/// The largest fp32 x with fp32(x / scale) <= midpoint; never -0. A scale of zero stands for a block of zeros: the
/// answer is an infinity, whatever x is compared with it.
W4Q_HOST_DEVICE constexpr float kbit_threshold(float midpoint, float scale) noexcept {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  if (scale == 0) return 0 > midpoint ? -infinity : infinity;
  // The limit lies between the products with the midpoint and with the value after it; the margins cover the rounding
  // of both. Bisection asks the definition itself: a few steps, sixteen where quotients are subnormal.
  constexpr int32_t margin = 4;
  const int32_t last = detail::float_order(infinity);
  const float next = detail::float_from_order(detail::float_order(midpoint) + 1);
  int32_t below = detail::float_order(midpoint * scale) - margin;
  int32_t above = detail::float_order(next * scale) + margin;
  if (below < -last) below = -last;
  if (above > last) above = last;
  while (above - below > 1) {
    const int32_t middle = below + (above - below) / 2;
    (detail::float_from_order(middle) / scale > midpoint ? above : below) = middle;
  }
  return detail::float_from_order(below);
}

/// The largest bfloat16 that is not above `value`, as bits; never -0.
W4Q_HOST_DEVICE constexpr uint16_t bf16_floor(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const bool negative = (bits >> 31) != 0 && magnitude != 0;
  const uint32_t kept = (magnitude + (negative ? 0xFFFFu : 0u)) >> 16;
  return static_cast<uint16_t>(negative ? 0x8000u | kept : kept);
}

/// The largest binary16 that is not above `value`, as bits; never -0. Above the largest finite half it is infinity,
/// which no finite half passes either.
W4Q_HOST_DEVICE constexpr uint16_t f16_floor(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const bool negative = (bits >> 31) != 0 && magnitude != 0;
  const float absolute = std::bit_cast<float>(magnitude);
  if (absolute > 65504.0f) return negative ? 0xFC00 : 0x7C00;
  uint32_t kept = 0;
  bool rest = false;
  if (absolute < 0x1p-14f) {
    const float steps = absolute * 0x1p24f;  // exact: of subnormal halves
    kept = static_cast<uint32_t>(steps);
    rest = static_cast<float>(kept) != steps;
  } else {
    kept = (magnitude - ((127u - 15u) << 23)) >> 13;
    rest = (magnitude & 0x1FFFu) != 0;
  }
  if (negative && rest) ++kept;
  return static_cast<uint16_t>(negative ? 0x8000u | kept : kept);
}

}  // namespace w4q::quantize
