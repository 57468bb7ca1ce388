#include "quantize/integer_simd.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "formats/integer.h"

// The lane count must be a constant here: sums keep sixteen lanes whatever a register holds.
#ifndef HWY_DISABLED_TARGETS  // W4Q_SIMD says more
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/integer_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Tag>;
constexpr size_t lanes = hn::MaxLanes(Tag());
constexpr size_t sum_lanes = 16;

/// formats::integer_code but for the zero: steps of a value from it, rounded and clamped.
class Rounding {
 public:
  Rounding(float scale, int zero, int bits)
      : scale_(hn::Set(Tag(), scale)),
        lowest_(hn::Set(Tag(), static_cast<float>(-zero))),
        highest_(hn::Set(Tag(), static_cast<float>((1 << bits) - 1 - zero))),
        rounder_(hn::Set(Tag(), 0x1.8p23f)) {}

  HWY_INLINE Vec steps(Vec x) const {
    const auto clamped = hn::Min(hn::Max(hn::Div(x, scale_), lowest_), highest_);
    return hn::Sub(hn::Add(clamped, rounder_), rounder_);
  }
  HWY_INLINE Vec value(Vec x) const { return hn::Mul(steps(x), scale_); }

 private:
  Vec scale_, lowest_, highest_, rounder_;
};

float rounded(float x, float scale, int zero, int bits) {
  return static_cast<float>(formats::integer_code(x, scale, zero, bits) - zero) * scale;
}

Range range(const float* values, size_t count) {
  const Tag d;
  const auto largest = hn::Set(d, std::numeric_limits<float>::max());
  auto low = hn::Zero(d);
  auto high = hn::Zero(d);
  auto finite = hn::Eq(low, low);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = hn::LoadU(d, values + i);
    low = hn::Min(low, x);
    high = hn::Max(high, x);
    finite = hn::And(finite, hn::Le(hn::Abs(x), largest));
  }
  Range result{hn::GetLane(hn::MinOfLanes(d, low)), hn::GetLane(hn::MaxOfLanes(d, high)), hn::AllTrue(d, finite)};
  for (; i < count; ++i) {
    result.low = std::min(result.low, values[i]);
    result.high = std::max(result.high, values[i]);
    result.finite = result.finite && std::isfinite(values[i]);
  }
  return result;
}

void codes(const float* values, size_t count, float scale, int zero, int bits, uint8_t* out) {
  const Tag d;
  const hn::RebindToSigned<Tag> di;
  const hn::Rebind<uint8_t, Tag> du8;
  const Rounding rounding(scale, zero, bits);
  const auto offset = hn::Set(di, zero);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto steps = hn::ConvertTo(di, rounding.steps(hn::LoadU(d, values + i)));
    hn::StoreU(hn::DemoteTo(du8, hn::Add(steps, offset)), du8, out + i);
  }
  for (; i < count; ++i) out[i] = formats::integer_code(values[i], scale, zero, bits);
}

void round_values(float* values, size_t count, float scale, int zero, int bits) {
  const Tag d;
  const Rounding rounding(scale, zero, bits);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(rounding.value(hn::LoadU(d, values + i)), d, values + i);
  for (; i < count; ++i) values[i] = rounded(values[i], scale, zero, bits);
}

double error(const float* values, size_t count, float scale, int zero, int bits) {
  const Tag d;
  const Rounding rounding(scale, zero, bits);
  constexpr size_t registers = sum_lanes / lanes;
  Vec sums[registers];
  for (auto& sum : sums) sum = hn::Zero(d);
  size_t i = 0;
  for (; i + sum_lanes <= count; i += sum_lanes) {
    for (size_t r = 0; r < registers; ++r) {
      const auto x = hn::LoadU(d, values + i + r * lanes);
      const auto difference = hn::Sub(x, rounding.value(x));
      sums[r] = hn::Add(sums[r], hn::Mul(difference, difference));
    }
  }
  std::array<float, sum_lanes> parts;
  for (size_t r = 0; r < registers; ++r) hn::StoreU(sums[r], d, parts.data() + r * lanes);
  for (; i < count; ++i) {
    const float difference = values[i] - rounded(values[i], scale, zero, bits);
    parts[i % sum_lanes] += difference * difference;
  }
  double sum = 0;
  for (const float part : parts) sum += static_cast<double>(part);
  return sum;
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::quantize {

HWY_EXPORT(range);
HWY_EXPORT(codes);
HWY_EXPORT(round_values);
HWY_EXPORT(error);

Range group_range(std::span<const float> values) { return HWY_DYNAMIC_DISPATCH(range)(values.data(), values.size()); }

void group_codes(std::span<const float> values, float scale, int zero, int bits, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(codes)(values.data(), values.size(), scale, zero, bits, out);
}

void group_round(std::span<float> values, float scale, int zero, int bits) {
  HWY_DYNAMIC_DISPATCH(round_values)(values.data(), values.size(), scale, zero, bits);
}

double group_error(std::span<const float> values, float scale, int zero, int bits) {
  return HWY_DYNAMIC_DISPATCH(error)(values.data(), values.size(), scale, zero, bits);
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
