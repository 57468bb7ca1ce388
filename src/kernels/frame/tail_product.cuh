// A small product of what a compact GEMV stores (TailProduct): a thread for each output, once the block has stored its N-tiles.
#pragma once

#include <cuda_fp16.h>

#include "kernels/frame/fix_up.cuh"

namespace w4q::kernels::frame {

/// Brings the block's share of the weight to the L2 cache.
__device__ __forceinline__ void prefetch_tail(const Launch& args, const FixUp& plan) {
  const TailProduct& tail = args.fusion.tail;
  if (tail.weight == nullptr || static_cast<int>(threadIdx.x) >= tail.outputs) return;
  const __half* const row = static_cast<const __half*>(tail.weight) + threadIdx.x * args.n;
#pragma unroll 1
  for (int group = plan.first_group; group < plan.past_stored(); ++group) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + 64 * group));
  }
}

/// A row's 64 weights of one N-tile.
struct TailWeights {
  uint4 words[8];

  TailWeights() = default;
  __device__ __forceinline__ explicit TailWeights(const __half* row) {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = __ldg(reinterpret_cast<const uint4*>(row) + i);
  }
  /// With 64 inputs in shared memory.
  __device__ __forceinline__ float product(const float* inputs) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t four[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = reinterpret_cast<const float4*>(inputs)[2 * i + half];
        const float2 low = __half22float2(reinterpret_cast<const __half2&>(four[2 * half]));
        const float2 high = __half22float2(reinterpret_cast<const __half2&>(four[2 * half + 1]));
        sums[0] = fmaf(low.x, x.x, sums[0]);
        sums[1] = fmaf(low.y, x.y, sums[1]);
        sums[2] = fmaf(high.x, x.z, sums[2]);
        sums[3] = fmaf(high.y, x.w, sums[3]);
      }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};

/// By the whole block, once its own warps' part of storing is done: those that store nothing have asked for their weights of
/// the first N-tile when it is there, and outputs are theirs first. Runs are shorter than an N-tile, so that these are fewer
/// than warps and two more.
template <int threads, class Partial>
__device__ __forceinline__ void multiply_tail(const Launch& args, const FixUp& plan, const Partial& partial) {
  const TailProduct& tail = args.fusion.tail;
  if (tail.weight == nullptr) return;
  const int output = threads - 1 - static_cast<int>(threadIdx.x);
  const bool takes = output < tail.outputs && plan.first_group < plan.past_stored();
  const __half* const row = static_cast<const __half*>(tail.weight) + output * args.n;
  TailWeights weights;
  if (takes) weights = TailWeights(row + 64 * plan.first_group);
  __syncthreads();
  if (!takes) return;
#pragma unroll 1
  for (int group = plan.first_group;;) {
    tail.parts[group * tail.outputs + output] = weights.product(partial.kept(group - plan.first_group));
    if (++group >= plan.past_stored()) break;
    weights = TailWeights(row + 64 * group);
  }
}

}  // namespace w4q::kernels::frame
