#include "core/measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/error.h"

// The lane count must be a constant here: sums keep eight lanes whatever a register holds.
#ifndef HWY_DISABLED_TARGETS  // W4Q_SIMD says more
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/measure.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t sum_lanes = 8;
using WideTag = hn::CappedTag<double, sum_lanes>;
constexpr size_t wide_lanes = hn::MaxLanes(WideTag());
constexpr size_t registers = sum_lanes / wide_lanes;

/// Eight lanes of fp64.
struct WideLanes {
  hn::Vec<WideTag> part[registers];

  HWY_INLINE WideLanes() {
    for (auto& each : part) each = hn::Zero(WideTag());
  }
  std::array<double, sum_lanes> values() const {
    std::array<double, sum_lanes> result;
    for (size_t r = 0; r < registers; ++r) hn::StoreU(part[r], WideTag(), result.data() + r * wide_lanes);
    return result;
  }
};

Difference difference(const float* a, const float* b, size_t count) {
  const WideTag d;
  const hn::Rebind<float, WideTag> df;
  WideLanes squares, errors, largest;
  Difference result;
  size_t i = 0;
  for (; i + sum_lanes <= count; i += sum_lanes) {
    for (size_t r = 0; r < registers; ++r) {
      const auto value = hn::PromoteTo(d, hn::LoadU(df, a + i + r * wide_lanes));
      const auto error = hn::Sub(value, hn::PromoteTo(d, hn::LoadU(df, b + i + r * wide_lanes)));
      squares.part[r] = hn::Add(squares.part[r], hn::Mul(value, value));
      errors.part[r] = hn::Add(errors.part[r], hn::Mul(error, error));
      largest.part[r] = hn::Max(largest.part[r], hn::Abs(error));
      result.changed += static_cast<int64_t>(hn::CountTrue(d, hn::Ne(error, hn::Zero(d))));
    }
  }
  auto square = squares.values(), squared_error = errors.values(), size = largest.values();
  for (; i < count; ++i) {
    const double value{a[i]}, error = value - double{b[i]};
    square[i % sum_lanes] += value * value;
    squared_error[i % sum_lanes] += error * error;
    size[0] = std::max(size[0], std::abs(error));
    result.changed += error != 0;
  }
  for (size_t lane = 0; lane < sum_lanes; ++lane) {
    result.squared += square[lane];
    result.squared_error += squared_error[lane];
    result.largest = std::max(result.largest, size[lane]);
  }
  return result;
}

/// One more magnitude.
HWY_INLINE void note(float size, Magnitudes& result) {
  result.second = std::max(result.second, std::min(result.largest, size));
  result.largest = std::max(result.largest, size);
}

Magnitudes magnitudes(const float* values, size_t count) {
  const hn::ScalableTag<float> d;
  constexpr size_t lanes = hn::MaxLanes(decltype(d)());
  auto largest = hn::Zero(d), second = hn::Zero(d), nothing = hn::Zero(d);
  Magnitudes result;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto value = hn::LoadU(d, values + i);
    const auto size = hn::Abs(value);
    second = hn::Max(second, hn::Min(largest, size));
    largest = hn::Max(largest, size);
    nothing = hn::Add(nothing, hn::Mul(value, hn::Zero(d)));  // NaN from the first value that is not finite
    result.zeros += static_cast<int64_t>(hn::CountTrue(d, hn::Eq(value, hn::Zero(d))));
  }
  std::array<float, lanes> sizes, others, sums;
  hn::StoreU(largest, d, sizes.data());
  hn::StoreU(second, d, others.data());
  hn::StoreU(nothing, d, sums.data());
  for (size_t lane = 0; lane < lanes; ++lane) {
    note(sizes[lane], result);
    note(others[lane], result);
    result.finite = result.finite && sums[lane] == 0;
  }
  for (; i < count; ++i) {
    note(std::abs(values[i]), result);
    result.zeros += values[i] == 0;
    result.finite = result.finite && std::isfinite(values[i]);
  }
  return result;
}

bool within(const float* values, float largest, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto limit = hn::Set(d, largest);
  auto held = hn::Eq(limit, limit);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) held = hn::And(held, hn::Le(hn::Abs(hn::LoadU(d, values + i)), limit));
  bool all = hn::AllTrue(d, held);
  for (; i < count; ++i) all = all && std::abs(values[i]) <= largest;
  return all;
}

}  // namespace w4q::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q {

HWY_EXPORT(difference);
HWY_EXPORT(magnitudes);
HWY_EXPORT(within);

Difference difference_of(std::span<const float> a, std::span<const float> b) {
  ensure(a.size() == b.size(), "difference_of: two lengths");
  return HWY_DYNAMIC_DISPATCH(difference)(a.data(), b.data(), a.size());
}

Magnitudes magnitudes_of(std::span<const float> values) {
  return HWY_DYNAMIC_DISPATCH(magnitudes)(values.data(), values.size());
}

bool all_within(std::span<const float> values, float largest) {
  return HWY_DYNAMIC_DISPATCH(within)(values.data(), largest, values.size());
}

}  // namespace w4q
#endif  // HWY_ONCE
