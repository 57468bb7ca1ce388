// formats::rotated_norm on the GPU, bit for bit.
#pragma once

#include <cstdint>

namespace w4q::quantize::cuda {

/// Of values(0 … size − 1), by a warp; in lane 0. Lane l adds values l, l + 32 … in order, then halves are folded as the
/// definition has it.
template <class Values>
__device__ double warp_norm(const Values& values, int64_t size, int64_t group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double sum = 0;
  for (int64_t i = lane; i < size; i += 32) {
    const double value = values(i);
    sum = __dadd_rn(sum, __dmul_rn(value, value));
  }
  for (int half = 16; half > 0; half /= 2) {
    const double other = __shfl_down_sync(~0u, sum, half);
    sum = __dadd_rn(sum, other);
  }
  if (size != group) sum = __ddiv_rn(__dmul_rn(sum, static_cast<double>(group)), static_cast<double>(size));
  return __dsqrt_rn(sum);
}

}  // namespace w4q::quantize::cuda
