#pragma once

#include "kernels/common/block_reduce.cuh"
#include "kernels/frame/route.h"

namespace w4q::kernels {

/// What completes the products of an input that lacks its norm. By a whole warp.
__device__ __forceinline__ float norm_factor(const RouteArgs& args) {
  const int sums = static_cast<int>((args.cols + 63) / 64);
  float squares = 0;
  for (int i = threadIdx.x % 32; i < sums; i += 32) squares += __ldcg(args.input_norm + 2 + i);
  const float mean = warp_sum(squares) / static_cast<float>(args.cols);
  return 1.0f / sqrtf(mean + args.eps) / __ldcg(args.input_norm);
}

/// The share of what is joined, its logit times `factor`.
__device__ __forceinline__ float share_of_joined(const RouteArgs& args, float factor) {
  if (args.stride == args.experts) return 1;
  return 1.0f / (1.0f + expf(-__ldcg(args.logits + args.experts) * factor));
}

}  // namespace w4q::kernels
