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

/// By the whole block, which has stored its groups. Runs are shorter than an N-tile, so that these are fewer than warps and
/// two more.
template <class Partial>
__device__ __forceinline__ void multiply_tail(const Launch& args, const FixUp& plan, const Partial& partial) {
  const TailProduct& tail = args.fusion.tail;
  if (tail.weight == nullptr) return;
  __syncthreads();
  const int output = static_cast<int>(threadIdx.x);
  if (output >= tail.outputs) return;
  const __half* const row = static_cast<const __half*>(tail.weight) + output * args.n;
#pragma unroll 1
  for (int group = plan.first_group; group < plan.past_stored(); ++group) {
    const auto* const from = reinterpret_cast<const uint4*>(row + 64 * group);
    const auto* const inputs = reinterpret_cast<const float4*>(partial.kept(group - plan.first_group));
    uint4 weights[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i] = __ldg(from + i);
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t words[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = inputs[2 * i + half];
        const float2 low = __half22float2(reinterpret_cast<const __half2&>(words[2 * half]));
        const float2 high = __half22float2(reinterpret_cast<const __half2&>(words[2 * half + 1]));
        sums[0] = fmaf(low.x, x.x, sums[0]);
        sums[1] = fmaf(low.y, x.y, sums[1]);
        sums[2] = fmaf(high.x, x.z, sums[2]);
        sums[3] = fmaf(high.y, x.w, sums[3]);
      }
    }
    tail.parts[group * tail.outputs + output] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}

}  // namespace w4q::kernels::frame
