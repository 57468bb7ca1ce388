// Rounding one group of weights to integers on the GPU: the scale and the codes of rtn.h, bit for bit (class E0). Half
// a warp has a group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "formats/integer.h"
#include "formats/scale_codec.h"
#include "quantize/rtn.h"

namespace w4q::quantize::cuda {

/// Lanes of a group: as many as the sums of the definition have (integer_simd.h), value i in lane i mod 16.
inline constexpr int group_lanes = 16;

/// What the definition takes from the scheme.
struct Rule {
  int bits;
  bool asymmetric;
  formats::ScaleType scale;
  float largest_scale;
  float least_normal;
  bool search;  ///< Clip::mse
};

inline Rule rule_of(const formats::Scheme& scheme, Clip clip) {
  return {scheme.bits,
          scheme.asymmetric,
          scheme.scale,
          formats::integer_scale_max(scheme),
          formats::scale_codec(scheme.scale).smallest_normal,
          clip == Clip::mse};
}

struct Scale {
  float value;
  uint32_t bits;
  int zero;
  bool saturated;
};

/// formats::integer_store_scale.
__device__ inline Scale store_scale(const Rule& rule, double scale) {
  using formats::ScaleType;
  const bool saturated = scale > static_cast<double>(rule.largest_scale);
  const float value = saturated ? rule.largest_scale : static_cast<float>(scale);
  if (rule.scale == ScaleType::f16) {
    const auto bits = max(static_cast<int>(__half_as_ushort(__float2half_rn(value))), 1);
    return {__half2float(__ushort_as_half(static_cast<unsigned short>(bits))), static_cast<uint32_t>(bits), 0,
            saturated};
  }
  if (rule.scale == ScaleType::bf16) {
    const auto bits = max(static_cast<int>(__bfloat16_as_ushort(__float2bfloat16_rn(value))), 1);
    return {__uint_as_float(static_cast<uint32_t>(bits) << 16), static_cast<uint32_t>(bits), 0, saturated};
  }
  const float single = value > 0 ? value : __uint_as_float(1);
  return {single, __float_as_uint(single), 0, saturated};
}

/// formats::integer_scale.
__device__ inline Scale scale_of(const Rule& rule, float low, float high) {
  low = fminf(low, 0.0f);
  high = fmaxf(high, 0.0f);
  const int steps = (1 << rule.bits) - 1;
  const double range = rule.asymmetric ? static_cast<double>(high) - static_cast<double>(low)
                                       : 2.0 * static_cast<double>(fmaxf(-low, high));
  Scale result = store_scale(rule, range == 0 ? 1.0 : range / steps);
  result.zero = 1 << (rule.bits - 1);
  if (!rule.asymmetric || range == 0) return result;
  const float zero = fminf(-low / result.value, static_cast<float>(steps));
  result.zero = static_cast<int>((zero + 0x1.8p23f) - 0x1.8p23f);
  return result;
}

/// formats::integer_code but for the zero.
__device__ inline float steps_of(float x, const Scale& scale, int bits) {
  const auto lowest = static_cast<float>(-scale.zero);
  const auto highest = static_cast<float>((1 << bits) - 1 - scale.zero);
  const float steps = fminf(fmaxf(x / scale.value, lowest), highest);
  return (steps + 0x1.8p23f) - 0x1.8p23f;
}

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

/// Weights as they are stored.
template <class T>
struct Stored {
  const T* values;
  __device__ float operator()(int64_t i) const { return widen(values[i]); }
};

/// One group, by the sixteen lanes of half a warp; `values(i)` is weight i.
template <class Values>
struct Group {
  Values values;
  int64_t count;
  int lane;
  unsigned mask;  ///< the half warp's lanes

  __device__ Group(const Values& values_, int64_t count_)
      : values(values_),
        count(count_),
        lane(static_cast<int>(threadIdx.x % group_lanes)),
        mask(0xFFFFu << (threadIdx.x % 32 / group_lanes * 16)) {}

  __device__ float reduce(float value, bool largest) const {
    for (int step = group_lanes / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(mask, value, step);
      value = largest ? fmaxf(value, other) : fminf(value, other);
    }
    return value;
  }

  /// The smallest range that holds all values and zero; false when a value is not finite.
  __device__ bool range(float& low, float& high) const {
    low = 0;
    high = 0;
    float finite = 1;
    for (int64_t i = lane; i < count; i += group_lanes) {
      const float x = values(i);
      low = fminf(low, x);
      high = fmaxf(high, x);
      if (!(fabsf(x) <= 3.402823466e+38f)) finite = 0;
    }
    low = reduce(low, false);
    high = reduce(high, true);
    return reduce(finite, false) != 0;
  }

  /// Σ (value − rounded value)² in the order of the definition.
  __device__ double error(const Scale& scale, int bits) const {
    float part = 0;
    for (int64_t i = lane; i < count; i += group_lanes) {
      const float x = values(i);
      const float difference = x - steps_of(x, scale, bits) * scale.value;
      part += difference * difference;
    }
    double sum = 0;
    for (int from = 0; from < group_lanes; ++from) {
      sum += static_cast<double>(__shfl_sync(mask, part, from, group_lanes));
    }
    return sum;
  }

  /// rtn_scale.
  __device__ Scale choose(const Rule& rule, float low, float high) const {
    Scale best = scale_of(rule, low, high);
    if (!rule.search || low == high) return best;
    double least = error(best, rule.bits);
    for (int step = 1; step < clip_steps; ++step) {
      const float share = clip_share(step);
      const Scale scale = scale_of(rule, low * share, high * share);
      const double wrong = error(scale, rule.bits);
      if (!(wrong < least)) continue;
      least = wrong;
      best = scale;
    }
    return best;
  }
};

}  // namespace w4q::quantize::cuda
