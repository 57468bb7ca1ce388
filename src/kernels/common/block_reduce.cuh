// Sums and maxima over a warp or a block, in a fixed order.
#pragma once

#include <cstdint>

namespace w4q::kernels {

/// combine() over all lanes, in every lane.
template <class T, class Combine>
__device__ __forceinline__ T warp_reduce(T value, const Combine& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  return warp_reduce(value, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float value) {
  return warp_reduce(value, [](float a, float b) { return fmaxf(a, b); });
}

/// combine() over all threads of the block, in every thread; `slots` is shared memory of 32 values. May be called again
/// with the same slots.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, T* slots, T neutral, const Combine& combine) {
  value = warp_reduce(value, combine);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();
  if (lane == 0) slots[warp] = value;
  __syncthreads();
  return warp_reduce(lane < warps ? slots[lane] : neutral, combine);
}

}  // namespace w4q::kernels
