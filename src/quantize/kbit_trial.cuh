// Trying scales on a block of kbit on the GPU: the candidates, the errors and the choice of kbit_panel.h, bit for bit
// (class E0). A warp has a block of one row; each lane tries other candidates.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/unroll.cuh"
#include "device/warp.cuh"
#include "formats/e4m4.h"
#include "formats/kbit.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize::cuda {

using device::all_lanes;
using device::unroll;
using device::warp_lanes;

/// What all blocks of a weight share, in the kernel's arguments.
struct KbitRule {
  float levels[32];
  float midpoints[32];
  int count;  ///< levels, 2^bits
  int bits;
  float largest;
  bool e4m4;
  bool search;  ///< Scales::search; otherwise the rule of absmax
};

inline KbitRule kbit_rule(const formats::Scheme& scheme, std::span<const float> codebook, Scales scales) {
  KbitRule rule{};
  std::copy(codebook.begin(), codebook.end(), rule.levels);
  formats::kbit_midpoints(codebook, std::span(rule.midpoints).first(codebook.size() - 1));
  rule.count = static_cast<int>(codebook.size());
  rule.bits = scheme.bits;
  rule.largest = formats::table_max(codebook);
  rule.e4m4 = scheme.scale == formats::ScaleType::e4m4;
  rule.search = scales == Scales::search;
  return rule;
}

/// A block in shared memory, each array on 16 bytes, as PanelBlock.
struct KbitBlock {
  const float* target;
  const float* weights;
  const float* importance;
  const float* coupling;  ///< [32][32]: what the residual of column c is worth to column j stands at c · 32 + j
  int columns;
};

__device__ inline float decode_scale(const KbitRule& rule, uint16_t bits) {
  return rule.e4m4 ? formats::e4m4_decode(static_cast<uint8_t>(bits)) : __half2float(__ushort_as_half(bits));
}

/// formats::store_scale.
__device__ inline uint16_t encode_scale(const KbitRule& rule, float absmax) {
  const float scale = absmax / rule.largest;
  if (rule.e4m4) return formats::e4m4_encode(scale);
  return min(__half_as_ushort(__float2half_rn(scale)), static_cast<unsigned short>(0x7BFF));
}

__device__ inline uint16_t candidate(const KbitRule& rule, uint16_t centre, int step) {
  if (rule.e4m4) return static_cast<uint16_t>(min(max(static_cast<int>(centre) + step, 1), 0xFF));
  const int octave = (step + 16 * 32) / 16 - 32;
  const float factor = ldexpf(1.0f + static_cast<float>(step - 16 * octave) / 16.0f, octave);
  const float value = __half2float(__ushort_as_half(centre)) * factor;
  const int bits = __half_as_ushort(__float2half_rn(value));
  return static_cast<uint16_t>(min(max(bits, 1), 0x7BFF));
}

/// The largest x that divided by `scale` is not above `midpoint`, as fp32 rounds the quotient. `scale` has at most 11
/// significant bits, so that the end of what rounds to the midpoint is exact in fp64.
__device__ inline float last_not_above(float midpoint, float scale) {
  const int bits = __float_as_int(midpoint == 0 ? 0.0f : midpoint);
  const float above = __int_as_float(bits >= 0 ? bits + 1 : bits - 1);
  const double end = static_cast<double>(scale) * (0.5 * (static_cast<double>(midpoint) + static_cast<double>(above)));
  const float x = __double2float_rd(end);
  const bool tied = static_cast<double>(x) == end, rounds_up = (bits & 1) != 0;
  if (!tied || !rounds_up) return x;
  const int own = __float_as_int(x);
  return x == 0 ? -__int_as_float(1) : __int_as_float(own > 0 ? own - 1 : own + 1);
}

struct Rounded {
  int code;
  float value;
};

/// The level that x reaches: of `ends` those below x, by halves.
template <int count>
__device__ __forceinline__ Rounded reached(const float* ends, const float* values, float x) {
  if constexpr (count == 1) {
    return {0, values[0]};
  } else {
    constexpr int half = count / 2;
    const bool above = x > ends[half - 1];
    float own_ends[half], own_values[half];
#pragma unroll
    for (int i = 0; i < half; ++i) {
      if (i + 1 < half) own_ends[i] = above ? ends[half + i] : ends[i];
      own_values[i] = above ? values[half + i] : values[i];
    }
    const Rounded found = reached<half>(own_ends, own_values, x);
    return {found.code + (above ? half : 0), found.value};
  }
}

/// The levels of one scale, and the last values that stay below each. In registers.
template <int bits>
struct Levels {
  static constexpr int count = 1 << bits;
  float ends[count], values[count];

  __device__ Levels(const float* levels, const float* midpoints, float scale) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      values[i] = levels[i] * scale;
      if (i + 1 == count) continue;
      ends[i] = scale == 0 ? (midpoints[i] < 0 ? -INFINITY : INFINITY) : last_not_above(midpoints[i], scale);
    }
  }
  __device__ Rounded nearest(float x) const { return reached<count>(ends, values, x); }
};

/// The codes of a block, column by column in registers.
template <int bits>
struct BlockCodes {
  static constexpr int each = 32 / bits;
  static constexpr int words = (formats::kbit_block + each - 1) / each;
  uint32_t word[words];

  /// `column` is known when this is compiled.
  __device__ __forceinline__ void set(int column, int code) {
    word[column / each] |= static_cast<uint32_t>(code) << (column % each * bits);
  }
  __device__ __forceinline__ int at(int column) const {
    uint32_t own = word[0];
#pragma unroll
    for (int i = 1; i < words; ++i) own = column / each == i ? word[i] : own;
    return static_cast<int>(own >> (column % each * bits) & ((1u << bits) - 1));
  }
};

/// What a trial leaves.
template <int bits>
struct Tried {
  float error;
  BlockCodes<bits> codes;
};

/// Floats in shared memory on 16 bytes, by their address there: of generic pointers the compiler makes generic loads, one
/// float at a time.
struct SharedFloats {
  uint32_t address;

  __device__ explicit SharedFloats(const float* floats)
      : address(static_cast<uint32_t>(__cvta_generic_to_shared(floats))) {}
  /// Floats 4 · i to 4 · i + 3.
  __device__ __forceinline__ float4 quad(int i) const {
    float4 result;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
                 : "r"(address + 16 * static_cast<uint32_t>(i))
                 : "memory");
    return result;
  }
  template <int count>
  __device__ __forceinline__ void read(float (&to)[count]) const {
    static_assert(count % 4 == 0);
#pragma unroll
    for (int i = 0; i < count / 4; ++i) {
      const float4 four = quad(i);
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  }
};

/// targets[to] += coupling · residual for all `to` behind column `c`, of which `coupling` has the row.
template <int c, int width>
__device__ __forceinline__ void move_targets(const SharedFloats& coupling, float residual, float (&targets)[width]) {
#pragma unroll
  for (int i = (c + 1) / 4; i < width / 4; ++i) {
    const float4 four = coupling.quad(c * (width / 4) + i);
    const float worth[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (4 * i + j > c) targets[4 * i + j] = targets[4 * i + j] + worth[j] * residual;
    }
  }
}

/// One copy for all that try, since it takes the compiler seconds. `table` and `midpoints` have 32 floats.
template <bool coupled, int bits>
__device__ __noinline__ Tried<bits> tried(SharedFloats table, SharedFloats midpoints, SharedFloats target,
                                          SharedFloats weights, SharedFloats importance, SharedFloats coupling,
                                          int columns, float scale, float unit) {
  constexpr int width = formats::kbit_block;
  float values[Levels<bits>::count], middles[Levels<bits>::count];
  table.read(values);
  midpoints.read(middles);
  const Levels<bits> levels(values, middles, scale);
  float targets[width];
  target.read(targets);
  Tried<bits> result{};
  // Without a branch for columns that are not there, so that loads of later columns are on their way early: nothing reads
  // their codes, their errors are left out, and nothing couples them to those that are there.
  unroll<width / 4>([&]<int four>() {
    const float4 own_importance = importance.quad(four), own_weights = coupled ? weights.quad(four) : float4{};
    const float weighed[4] = {own_importance.x, own_importance.y, own_importance.z, own_importance.w};
    [[maybe_unused]] const float plain[4] = {own_weights.x, own_weights.y, own_weights.z, own_weights.w};
    unroll<4>([&]<int j>() {
      constexpr int c = 4 * four + j;
      const Rounded found = levels.nearest(targets[c]);
      const float miss = (targets[c] - found.value) * unit;
      const float error = result.error + miss * miss * weighed[j];
      result.error = c < columns ? error : result.error;
      result.codes.set(c, found.code);
      if constexpr (coupled) move_targets<c>(coupling, plain[j] - found.value, targets);
    });
  });
  return result;
}

/// What a block is rounded to: the scale's bits, and codes, in every lane.
template <int bits>
struct KbitChoice {
  uint16_t scale;
  BlockCodes<bits> codes;
};

/// The choice of scale of one warp, or of several that share what there is to try.
template <bool coupled, int bits>
class ScaleChoice {
 public:
  /// What a warp leaves for another, in shared memory.
  struct Best {
    float error;
    KbitChoice<bits> choice;
  };

  __device__ ScaleChoice(const KbitRule& rule, const float* levels, const float* midpoints, const KbitBlock& block)
      : rule_(rule), levels_(levels), midpoints_(midpoints), block_(block) {
    const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
    absmax_ = lane < block.columns ? fabsf(block.target[lane]) : 0.0f;
    for (int step = 16; step > 0; step /= 2) absmax_ = fmaxf(absmax_, __shfl_xor_sync(all_lanes, absmax_, step));
    const int exponent = absmax_ > 0 ? min(max(ilogbf(absmax_), -126), 126) : 0;
    unit_ = ldexpf(1.0f, -exponent);
  }

  __device__ KbitChoice<bits> choose() {
#pragma unroll 1
    for (int part = 0; part < parts; ++part) search(part);
    return settle();
  }

  /// For `parts` warps: each searches a part, and one of them takes in what the others found before it settles.
  static constexpr int parts = 2;
  __device__ void search(int part) {
    if (!rule_.search) return;
    const uint16_t centre = encode_scale(rule_, absmax_);
    const int lane = static_cast<int>(threadIdx.x) % warp_lanes, step = lowest + part * warp_lanes + lane;
    const auto scale = absmax_ == 0 ? uint16_t{0} : candidate(rule_, centre, step);
    Tried<bits> found = attempt(scale);
    if (step > highest || !(found.error < INFINITY)) found.error = INFINITY;
    take_best(found, step, scale);
  }
  __device__ Best best() const { return {least_, best_}; }
  /// Of a later part.
  __device__ void take_in(const Best& other) {
    if (!(other.error < least_)) return;
    least_ = other.error;
    best_ = other.choice;
  }
  __device__ KbitChoice<bits> settle() {
    if (!rule_.search) best_.scale = encode_scale(rule_, absmax_);
    if (!(least_ < INFINITY)) best_.codes = attempt(best_.scale).codes;
    if (!rule_.search) return best_;
    if (!rule_.e4m4) {
#pragma unroll 1
      for (int round = 0; round < 3; ++round) refine();
    }
    return best_;
  }

 private:
  static constexpr int lowest = -32;
  static constexpr int highest = 8;
  static_assert(highest - lowest < parts * warp_lanes);

  /// The block rounded with `scale` by every lane, which may differ.
  __device__ Tried<bits> attempt(uint16_t scale) const {
    return tried<coupled, bits>(SharedFloats(levels_), SharedFloats(midpoints_), SharedFloats(block_.target),
                                SharedFloats(block_.weights), SharedFloats(block_.importance),
                                SharedFloats(block_.coupling), block_.columns, decode_scale(rule_, scale), unit_);
  }

  /// The least error of all lanes, ties to the lower step, if it is below the best so far.
  __device__ void take_best(const Tried<bits>& found, int step, uint16_t scale) {
    float error = found.error;
    int first = step;
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other_error = __shfl_xor_sync(all_lanes, error, distance);
      const int other_step = __shfl_xor_sync(all_lanes, first, distance);
      if (other_error < error || (other_error == error && other_step < first)) {
        error = other_error;
        first = other_step;
      }
    }
    if (!(error < least_)) return;
    least_ = error;
    const int lane = static_cast<int>(threadIdx.x) % warp_lanes, winner = first - (step - lane);
    best_.scale = static_cast<uint16_t>(__shfl_sync(all_lanes, static_cast<int>(scale), winner));
#pragma unroll
    for (int i = 0; i < BlockCodes<bits>::words; ++i) {
      best_.codes.word[i] = __shfl_sync(all_lanes, found.codes.word[i], winner);
    }
  }

  /// f16: the scale that fits the codes of the best one best, were it not for coupling. All lanes do the same.
  __device__ void refine() {
    double product = 0, square = 0;
    for (int c = 0; c < block_.columns; ++c) {
      const double level = levels_[best_.codes.at(c)];
      const double weight = block_.importance[c];
      product += weight * level * static_cast<double>(block_.target[c]);
      square += weight * level * level;
    }
    uint16_t fitting = best_.scale;
    if (square > 0 && product > 0 && absmax_ != 0) {
      const int half = __half_as_ushort(__float2half_rn(static_cast<float>(product / square)));
      fitting = static_cast<uint16_t>(min(max(half, 1), 0x7BFF));
    }
    const Tried<bits> found = attempt(fitting);
    if (!(found.error < least_)) return;
    least_ = found.error;
    best_ = {fitting, found.codes};
  }

  const KbitRule& rule_;
  const float* levels_;
  const float* midpoints_;
  const KbitBlock& block_;
  float absmax_, unit_;
  float least_ = INFINITY;
  KbitChoice<bits> best_{};
};

}  // namespace w4q::quantize::cuda
