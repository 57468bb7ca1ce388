// Pages of q4 as operands of mma.m16n8k16. Codes are used as they stand: a nibble, masked out of its word, is an f16
// of code · 2^-24, or 2^-20 four bits higher, and products with it are exact. Steps and leasts stay outside of the sums
// over dims and tokens: scores are summed by groups and multiplied then, steps of values go into the weights; what is
// least takes one more product of its own.
#pragma once

#include <cuda_fp16.h>

#include "device/fragment.cuh"
#include "kernels/attention/kv_fragments.cuh"
#include "kernels/attention/kv_page.h"

namespace w4q::kernels {

inline constexpr float q4_code_unit = 0x1p-24f;  ///< of nibbles 0 and 2 of a halfword; 1 and 3 have 16 times that
__device__ __forceinline__ uint32_t q4_low(uint32_t word) { return word & 0x000F000Fu; }
__device__ __forceinline__ uint32_t q4_high(uint32_t word) { return word & 0x00F000F0u; }

/// The queries of a block as the B operand that meets keys of q4: lane (g, t) has head g.
template <int dim>
struct Q4Queries {
  static constexpr int groups = dim / kv_group;
  static constexpr int steps = dim / 16;
  uint32_t words[steps][2];  ///< the second ones over 16
  uint32_t sums[2];          ///< of groups 2t and 2t + 1: rounded, and what is left

  template <class Row>
  __device__ void load(const Row* queries) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    constexpr uint32_t sixteenth = 0x2C002C00u;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const uint4 four = *reinterpret_cast<const uint4*>(&queries[g][kv_group * group + 8 * t]);
      words[2 * group][0] = four.x, words[2 * group][1] = device::HalfType::multiply(four.y, sixteenth);
      words[2 * group + 1][0] = four.z, words[2 * group + 1][1] = device::HalfType::multiply(four.w, sixteenth);
    }
    sum_groups(g);
  }

 private:
  /// Queries as A times columns of ones for the dims of a group: head g, groups 2t and 2t + 1 come out in this lane.
  __device__ void sum_groups(int g) {
    float c[4] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint32_t a[4] = {words[step][0], 0, words[step][1], 0};
      device::HalfType::mma(c, a, g == step / 2 ? 0x3C003C00u : 0u, g == step / 2 ? 0x4C004C00u : 0u);
    }
    sums[0] = device::HalfType::pack(c[0], c[1]);
    const float2 rounded = __half22float2(reinterpret_cast<const __half2&>(sums[0]));
    sums[1] = device::HalfType::pack(c[0] - rounded.x, c[1] - rounded.y);
  }
};

/// Keys 2g and 2g + 1 of a page, a lane's part.
template <int dim>
struct Q4Keys {
  using Queries = Q4Queries<dim>;
  static constexpr int groups = dim / kv_group;

  Words<2 * groups> codes;  ///< [token][group]
  Words<groups> key_steps;  ///< [token][pair of groups]
  uint2 least;              ///< of the two tokens, groups 2t and 2t + 1, or others where there are fewer

  __device__ void load(const std::byte* page) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
    codes.template load<4>(page + lane * 16, 512);
    key_steps.template load < groups<4 ? groups : 4>(page + q4_key_step(dim, 0, 0) + g * 4 * groups, 16);
    least = *reinterpret_cast<const uint2*>(page + q4_key_least(dim, 0, 0) + (g * groups / 2 + t % (groups / 2)) * 8);
  }
  /// c: tokens 2g (twice) and 2g + 1, heads 2t and 2t + 1 of each, over score_unit.
  __device__ void scores(const Queries& queries, float (&c)[4]) const {
    const uint32_t leasts[4] = {least.x, least.y, least.x, least.y};
    float base[4] = {};
    device::HalfType::mma(base, leasts, queries.sums[0], queries.sums[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = base[i] * q4_code_unit;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      float sums[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t first = codes.w[group] >> 8 * half, second = codes.w[groups + group] >> 8 * half;
        const uint32_t a[4] = {q4_low(first), q4_low(second), q4_high(first), q4_high(second)};
        const uint32_t(&words)[2] = queries.words[2 * group + half];
        device::HalfType::mma(sums, a, words[0], words[1]);
      }
      const float low = step(0, group), high = step(1, group);
      c[0] = fmaf(sums[0], low, c[0]), c[1] = fmaf(sums[1], low, c[1]);
      c[2] = fmaf(sums[2], high, c[2]), c[3] = fmaf(sums[3], high, c[3]);
    }
  }
  static constexpr float score_unit = 1 / q4_code_unit;

 private:
  __device__ float step(int token, int group) const {
    const uint32_t word = key_steps.w[token * groups / 2 + group / 2];
    const auto& pair = reinterpret_cast<const __half2&>(word);
    return group % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }
};

/// Values of tokens 4t … 4t + 3 of a page, a lane's part.
template <int dim>
struct Q4Values {
  static constexpr int groups = dim / kv_group;
  static constexpr bool has_scales = true;
  static constexpr float usual_scale = 1;  ///< values that span up to 15

  Words<2 * groups> codes;        ///< [token][pair of groups]
  Words<2 * groups> value_steps;  ///< [group][tokens 0 and 2, tokens 1 and 3]
  uint2 least;                    ///< of group g, the same tokens

  __device__ void load(const std::byte* page) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
    codes.template load<4>(page + lane * 16, 512);
    value_steps.template load<4>(page + q4_value_step(dim, 0, 0) + t * 8 * groups, 16);
    least = *reinterpret_cast<const uint2*>(page + q4_value_least(dim, 0, 0) + (g % groups * 4 + t) * 8);
  }
  /// Forgets tokens that sees(slot) refuses: their weights are zero, but what stands there may be anything.
  template <class Sees>
  __device__ void clear(const Sees& sees) {
    const int first = static_cast<int>(threadIdx.x % 4) * 4;
    const uint32_t even = (sees(first) ? 0xFFFFu : 0u) | (sees(first + 2) ? 0xFFFF0000u : 0u);
    const uint32_t odd = (sees(first + 1) ? 0xFFFFu : 0u) | (sees(first + 3) ? 0xFFFF0000u : 0u);
    least.x &= even, least.y &= odd;
#pragma unroll
    for (int group = 0; group < groups; ++group) value_steps.w[2 * group] &= even, value_steps.w[2 * group + 1] &= odd;
  }
  /// What weights are multiplied with, at most.
  __device__ float largest_scale() const {
    __half2 most = step_pair(0);
#pragma unroll
    for (int i = 1; i < 2 * groups; ++i) most = __hmax2(most, step_pair(i));
    return fmaxf(__low2float(most), __high2float(most));
  }
  __device__ void scale(float (&)[4]) const {}

 private:
  __device__ const __half2& step_pair(int i) const { return reinterpret_cast<const __half2&>(value_steps.w[i]); }
};

/// A warp's sums over values of q4: heads 2t and 2t + 1.
template <int dim>
struct Q4Sums {
  static constexpr int groups = dim / kv_group;
  float tiles[2 * groups][4];  ///< of codes times steps, dims 32s + 4g + 2m and the one after it in tile 2s + m
  float rest[4];               ///< of what is least in group g, and of the weights

  __device__ void clear() {
#pragma unroll
    for (auto& tile : tiles) tile[0] = tile[1] = tile[2] = tile[3] = 0;
    rest[0] = rest[1] = rest[2] = rest[3] = 0;
  }
  __device__ void rescale(float low, float high) {
#pragma unroll
    for (auto& tile : tiles) tile[0] *= low, tile[1] *= high, tile[2] *= low, tile[3] *= high;
    rest[0] *= low, rest[1] *= high, rest[2] *= low, rest[3] *= high;
  }
  /// Weights of tokens 4t and 4t + 2, and of 4t + 1 and 4t + 3, of head g.
  __device__ void add(const Q4Values<dim>& values, uint32_t b0, uint32_t b1, const float (&)[4]) {
    constexpr uint32_t ones = 0x3C003C00u;
    const uint32_t leasts[4] = {values.least.x, ones, values.least.y, ones};
    device::HalfType::mma(rest, leasts, b0, b1);
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const uint32_t even = device::HalfType::multiply(b0, values.value_steps.w[2 * group]);
      const uint32_t odd = device::HalfType::multiply(b1, values.value_steps.w[2 * group + 1]);
      const auto word = [&](int token) { return values.codes.w[token * groups / 2 + group / 2]; };
      const uint32_t halves = group % 2 == 0 ? 0x5410 : 0x7632;
      const uint32_t first = __byte_perm(word(0), word(2), halves), second = __byte_perm(word(1), word(3), halves);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t a[4] = {q4_low(first >> 8 * m), q4_high(first >> 8 * m), q4_low(second >> 8 * m),
                               q4_high(second >> 8 * m)};
        device::HalfType::mma(tiles[2 * group + m], a, even, odd);
      }
    }
  }
  __device__ float2 weights() const { return make_float2(rest[2], rest[3]); }
  /// `to(head, d, four)` takes sums of head 2t + head for dims d … d + 3.
  template <class Store>
  __device__ void store(const Store& to) const {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    constexpr float low = 1 / q4_code_unit, high = low / 16;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const auto& first = tiles[2 * group];
      const auto& second = tiles[2 * group + 1];
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        const float least = __shfl_sync(0xFFFFFFFFu, rest[head], 4 * group + t);
        to(head, kv_group * group + 4 * g,
           make_float4(fmaf(first[head], low, least), fmaf(first[head + 2], high, least),
                       fmaf(second[head], low, least), fmaf(second[head + 2], high, least)));
      }
    }
  }
};

}  // namespace w4q::kernels
