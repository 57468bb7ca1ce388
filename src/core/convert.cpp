#include "core/convert.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/float_formats.h"

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

/// bf16_from_f32 of the bits of fp32 values, in the low half of each lane.
template <class DU>
HWY_INLINE hn::Vec<DU> narrow_bf16(DU du, hn::Vec<DU> bits) {
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  const auto is_nan = hn::Gt(hn::And(bits, hn::Set(du, 0x7FFFFFFFu)), hn::Set(du, 0x7F800000u));
  return hn::IfThenElse(is_nan, quiet, rounded);
}

/// f16_from_f32 in the same way. Subnormals of binary16 are rounded by a sum whose last place is theirs.
template <class DU>
HWY_INLINE hn::Vec<DU> narrow_f16(DU du, hn::Vec<DU> bits) {
  const hn::RebindToFloat<DU> d;
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rebased = hn::Sub(magnitude, hn::Set(du, (127u - 15u) << 23));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebased, hn::Set(du, 0xFFFu)), odd));
  const auto sum = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(du, sum), hn::BitCast(du, hn::Set(d, 0.5f)));
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3FFu));
  const auto infinite = hn::Set(du, 0x7C00u), nan = hn::Or(payload, hn::Set(du, 0x7E00u));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), subnormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477FFFFFu)), infinite, result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7F800000u)), nan, result);
  return hn::Or(result, sign);
}

void narrow_array(const float* values, bool is_bf16, std::byte* bytes, size_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const size_t lanes = hn::Lanes(d);
  const auto convert = [&](hn::VFromD<decltype(d)> wide) HWY_ATTR {
    const auto bits = hn::BitCast(du, wide);
    return hn::DemoteTo(d16, hn::BitCast(di, is_bf16 ? narrow_bf16(du, bits) : narrow_f16(du, bits)));
  };
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(convert(hn::LoadU(d, values + i)), d16, reinterpret_cast<uint16_t*>(bytes + 2 * i));
  }
  if (i < count) {
    alignas(64) float tail[hn::MaxLanes(d)] = {};
    alignas(64) uint16_t halves[hn::MaxLanes(d16)];
    std::memcpy(tail, values + i, sizeof(float) * (count - i));
    hn::Store(convert(hn::Load(d, tail)), d16, halves);
    std::memcpy(bytes + 2 * i, halves, 2 * (count - i));
  }
}

/// Lanes of small floats: two registers of them are no more than the shortest block of scales, 16 values.
using SmallTag = hn::CappedTag<float, 8>;
using SmallCodes = hn::Vec<hn::RebindToUnsigned<SmallTag>>;

/// Where exponent and mantissa stand in the fp32 bits, the value is 2^-120 (E4M3) or 2^-126 (E2M1) of what it is,
/// subnormals included: the first product is exact.
HWY_INLINE hn::Vec<SmallTag> value_of_e4m3(SmallCodes codes) {
  const SmallTag d;
  const hn::RebindToUnsigned<SmallTag> du;
  const auto magnitude = hn::And(codes, hn::Set(du, 0x7Fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(du, 0x80u)));
  const auto scaled = hn::Mul(hn::BitCast(d, hn::ShiftLeft<20>(magnitude)), hn::Set(d, 0x1p120f));
  const auto is_nan = hn::Eq(magnitude, hn::Set(du, 0x7Fu));
  const auto bits = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC00000u), hn::BitCast(du, scaled));
  return hn::BitCast(d, hn::Or(bits, sign));
}

HWY_INLINE hn::Vec<SmallTag> value_of_e2m1(SmallCodes codes) {
  const SmallTag d;
  const hn::RebindToUnsigned<SmallTag> du;
  const auto sign = hn::ShiftLeft<28>(hn::And(codes, hn::Set(du, 8u)));
  const auto magnitude = hn::ShiftLeft<22>(hn::And(codes, hn::Set(du, 7u)));
  const auto scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p126f));
  return hn::BitCast(d, hn::Or(hn::BitCast(du, scaled), sign));
}

HWY_INLINE SmallCodes load_codes(const std::byte* codes) {
  const hn::Rebind<uint8_t, SmallTag> d8;
  const hn::RebindToUnsigned<SmallTag> du;
  return hn::PromoteTo(du, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(codes)));
}

void e4m3_array(const std::byte* codes, const float* scales, size_t block, float* out, size_t count) {
  const SmallTag d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0, b = 0; i < count; ++b) {
    const size_t end = std::min(count, i + block);
    const auto scale = hn::Set(d, scales[b]);
    for (; i + lanes <= end; i += lanes) hn::StoreU(hn::Mul(value_of_e4m3(load_codes(codes + i)), scale), d, out + i);
    for (; i < end; ++i) out[i] = f32_from_e4m3(static_cast<uint8_t>(codes[i])) * scales[b];
  }
}

void e2m1_array(const std::byte* codes, const float* scales, size_t block, float* out, size_t count) {
  const SmallTag d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0, b = 0; i < count; ++b) {
    const size_t end = std::min(count, i + block);
    const auto scale = hn::Set(d, scales[b]);
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      const SmallCodes pairs = load_codes(codes + i / 2);
      const auto even = hn::Mul(value_of_e2m1(pairs), scale);
      const auto odd = hn::Mul(value_of_e2m1(hn::ShiftRight<4>(pairs)), scale);
      hn::StoreInterleaved2(even, odd, d, out + i);
    }
    for (; i < end; ++i) out[i] = f32_from_e2m1(static_cast<uint32_t>(codes[i / 2]) >> i % 2 * 4 & 15) * scales[b];
  }
}

}  // namespace w4q::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace w4q {

HWY_EXPORT(widen_array);
HWY_EXPORT(narrow_array);
HWY_EXPORT(e4m3_array);
HWY_EXPORT(e2m1_array);

namespace {

void check_scales(std::span<const float> scales, size_t block, size_t count) {
  ensure(block > 0 && scales.size() >= (count + block - 1) / block, "widen: too few scales");
}

}  // namespace

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
  HWY_DYNAMIC_DISPATCH(narrow_array)(values.data(), dtype == DType::bf16, bytes.data(), values.size());
}

void widen_e4m3(std::span<const std::byte> codes, std::span<const float> scales, size_t block, std::span<float> out) {
  ensure(codes.size() >= out.size(), "widen: source too short");
  check_scales(scales, block, out.size());
  HWY_DYNAMIC_DISPATCH(e4m3_array)(codes.data(), scales.data(), block, out.data(), out.size());
}

void widen_e2m1(std::span<const std::byte> codes, std::span<const float> scales, size_t block, std::span<float> out) {
  ensure(block % 2 == 0 && out.size() % 2 == 0, "widen: half a byte of E2M1");
  ensure(codes.size() >= out.size() / 2, "widen: source too short");
  check_scales(scales, block, out.size());
  HWY_DYNAMIC_DISPATCH(e2m1_array)(codes.data(), scales.data(), block, out.data(), out.size());
}

}  // namespace w4q
#endif  // HWY_ONCE
