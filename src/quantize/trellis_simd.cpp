#include "quantize/trellis_simd.h"

#include "core/with_bits.h"

// The lane count must be a constant here: levels stand in the order of lanes.
#ifndef HWY_DISABLED_TARGETS  // W4Q_SIMD says more
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/trellis_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
constexpr size_t lanes = hn::MaxLanes(Tag());
static_assert(lanes <= formats::trellis_overread);

/// What the lanes of a vector of groups, the first of them `group`, have spent on their way here: neighbours that are
/// 2^bits or more apart come from different ones.
template <int bits>
HWY_INLINE hn::Vec<Tag> spent(const float* from, size_t group, hn::Vec<hn::RebindToSigned<Tag>> origin) {
  const Tag d;
  if constexpr (lanes <= size_t{1} << bits) return hn::Set(d, from[group >> bits]);
  return hn::TableLookupLanes(hn::LoadU(d, from + (group >> bits)), hn::IndicesFromVec(d, origin));
}

template <int bits>
HWY_INLINE void step_of(size_t groups, const float* least, const float* levels, float target, float* next) {
  const Tag d;
  constexpr size_t ways = size_t{1} << bits;
  const auto origin = hn::ShiftRight<bits>(hn::Iota(hn::RebindToSigned<Tag>(), 0));
  const auto x = hn::Set(d, target);
  for (size_t g = 0; g < groups; g += lanes, levels += ways * lanes) {
    auto best = hn::Set(d, 0.0f);
    HWY_UNROLL(16)
    for (size_t way = 0; way < ways; ++way) {
      const auto off = hn::Sub(hn::LoadU(d, levels + way * lanes), x);
      const auto cost = hn::Add(spent<bits>(least + way * (groups >> bits), g, origin), hn::Mul(off, off));
      best = way == 0 ? cost : hn::Min(best, cost);
    }
    hn::StoreU(best, d, next + g);
  }
}

void step(int bits, size_t groups, const float* least, const float* levels, float target, float* next) {
  with_bits<1, 2, 3, 4, 5, 6, 7, 8>(bits,
                                    [&]<int width>() HWY_ATTR { step_of<width>(groups, least, levels, target, next); });
}

/// A vector of groups at a time, one vector for each way into it.
void order_levels(int bits, size_t groups, const float* levels, float* out) {
  for (size_t g = 0; g < groups; g += lanes) {
    for (size_t way = 0; way < size_t{1} << bits; ++way) {
      for (size_t lane = 0; lane < lanes; ++lane) *out++ = levels[way * groups + g + lane];
    }
  }
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::quantize {
namespace {

HWY_EXPORT(step);
HWY_EXPORT(order_levels);

}  // namespace

std::vector<float> trellis_fast_levels(int bits, int window) {
  return trellis_fast_levels(bits, formats::trellis_levels(window));
}

std::vector<float> trellis_fast_levels(int bits, std::span<const float> levels) {
  std::vector<float> ordered(levels.size());
  HWY_DYNAMIC_DISPATCH(order_levels)(bits, levels.size() >> bits, levels.data(), ordered.data());
  return ordered;
}

void trellis_fast_step(int bits, int window, const float* least, const float* levels, float target, float* next) {
  HWY_DYNAMIC_DISPATCH(step)(bits, size_t{1} << (window - bits), least, levels, target, next);
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
