#include "quantize/lattice_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/lattice_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace lattice {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, formats::lattice_scales>;
}  // namespace lattice

void nearest_of(const LatticePoints& points, const float* scales, float* errors, uint16_t* codes) {
  namespace hn = lattice::hn;
  const lattice::Tag d;
  alignas(64) float found[formats::lattice_scales];
  for (size_t lane = 0; lane < formats::lattice_scales; lane += hn::Lanes(d)) {
    const auto once = hn::LoadU(d, scales + lane), twice = hn::Add(once, once);
    auto best = hn::Set(d, 3.4e38f), code = hn::Zero(d);
    for (size_t i = 0; i < points.count; ++i) {
      const size_t p = points.codes == nullptr ? i : points.codes[i];
      const auto error = hn::Sub(hn::Mul(once, hn::Mul(once, hn::Set(d, points.self[p]))),
                                 hn::Mul(twice, hn::Set(d, points.cross[p])));
      const auto less = hn::Lt(error, best);
      best = hn::IfThenElse(less, error, best);
      code = hn::IfThenElse(less, hn::Set(d, static_cast<float>(p)), code);
    }
    hn::StoreU(best, d, errors + lane);
    hn::StoreU(code, d, found + lane);
  }
  for (size_t s = 0; s < formats::lattice_scales; ++s) codes[s] = static_cast<uint16_t>(found[s]);
}

void add_levels_of(const float* levels, size_t count, float product, float weight, float* cross, float* self) {
  namespace hn = lattice::hn;
  const lattice::Tag d;
  const auto a = hn::Set(d, product), b = hn::Set(d, weight);
  for (size_t p = 0; p < count; p += hn::Lanes(d)) {  // tables are multiples of sixteen
    const auto level = hn::LoadU(d, levels + p);
    hn::StoreU(hn::Add(hn::LoadU(d, cross + p), hn::Mul(a, level)), d, cross + p);
    hn::StoreU(hn::Add(hn::LoadU(d, self + p), hn::Mul(b, hn::Mul(level, level))), d, self + p);
  }
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::quantize {
namespace {

HWY_EXPORT(nearest_of);
HWY_EXPORT(add_levels_of);

}  // namespace

void nearest_points(const LatticePoints& points, const float* scales, float* errors, uint16_t* codes) {
  HWY_DYNAMIC_DISPATCH(nearest_of)(points, scales, errors, codes);
}

void add_levels(const float* levels, size_t count, float product, float weight, float* cross, float* self) {
  HWY_DYNAMIC_DISPATCH(add_levels_of)(levels, count, product, weight, cross, self);
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
