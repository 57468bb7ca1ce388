#include "core/convert.h"

#include <cstring>

#include "core/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/convert.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Loads as many 16-bit values as `D` has lanes; `bytes` may be unaligned.
template <class D16>
HWY_INLINE hn::Vec<D16> load16(D16 d16, const std::byte* bytes) {
  return hn::LoadU(d16, reinterpret_cast<const hn::TFromD<D16>*>(bytes));
}

/// fp32 bits of the half floats in the low 16 bits of each lane, by integer arithmetic and one exact product, so that
/// every instruction set gives the same bits and a signalling NaN comes out quiet as from a hardware conversion.
template <class D>
HWY_INLINE hn::Vec<D> widen_f16(D d, hn::VFromD<hn::RebindToUnsigned<D>> half) {
  const hn::RebindToUnsigned<D> du;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(du, 0x7FFFu));
  // Shifted into place the value is 2^-112 too small, subnormals included: the product is exact.
  const auto scaled = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f));
  const auto special = hn::Or(hn::Set(du, 0x7F800000u), hn::ShiftLeft<13>(hn::And(magnitude, hn::Set(du, 0x3FFu))));
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7BFFu));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, hn::BitCast(du, scaled))));
}

void widen_array(const std::byte* bytes, bool is_bf16, float* out, size_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const size_t lanes = hn::Lanes(d);
  const auto convert = [&](hn::VFromD<decltype(du)> raw)
                           HWY_ATTR { return is_bf16 ? hn::BitCast(d, hn::ShiftLeft<16>(raw)) : widen_f16(d, raw); };
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(convert(hn::PromoteTo(du, load16(d16, bytes + 2 * i))), d, out + i);
  }
  if (i < count) {
    alignas(64) uint16_t tail[hn::MaxLanes(d16)] = {};
    alignas(64) float wide[hn::MaxLanes(d)];
    std::memcpy(tail, bytes + 2 * i, 2 * (count - i));
    hn::Store(convert(hn::PromoteTo(du, hn::Load(d16, tail))), d, wide);
    std::memcpy(out + i, wide, sizeof(float) * (count - i));
  }
}

}  // namespace w4q::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "core/float_formats.h"

namespace w4q {

HWY_EXPORT(widen_array);

void widen(std::span<const std::byte> bytes, DType dtype, std::span<float> out) {
  ensure(is_weight_dtype(dtype), "widen: not a weight type");
  ensure(bytes.size() >= out.size() * static_cast<size_t>(dtype_bits(dtype)) / 8, "widen: source too short");
  if (out.empty()) return;
  if (dtype == DType::f32) {
    std::memcpy(out.data(), bytes.data(), out.size_bytes());
  } else {
    HWY_DYNAMIC_DISPATCH(widen_array)(bytes.data(), dtype == DType::bf16, out.data(), out.size());
  }
}

void narrow(std::span<const float> values, DType dtype, std::span<std::byte> bytes) {
  ensure(is_weight_dtype(dtype), "narrow: not a weight type");
  ensure(bytes.size() == values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8, "narrow: wrong destination size");
  if (values.empty()) return;
  if (dtype == DType::f32) {
    std::memcpy(bytes.data(), values.data(), values.size_bytes());
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::f16 ? f16_from_f32(values[i]) : bf16_from_f32(values[i]);
    std::memcpy(bytes.data() + 2 * i, &half, sizeof half);
  }
}

}  // namespace w4q
#endif  // HWY_ONCE
