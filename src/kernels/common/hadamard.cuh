// The fast Walsh–Hadamard transform of one warp: butterflies at distances 1, 2, 4 … as formats::hadamard has them, so
// that results are equal bit for bit (class E0). Lane l holds values l, l + 32, l + 64 …: the first five stages are
// shuffles, the others stay in registers.
#pragma once

#include <cstdint>

namespace w4q::kernels {

/// values ← H · values for the first `width` of the 32·Values values of a warp, a power of two; all lanes take part.
template <int Values>
__device__ __forceinline__ void warp_hadamard(float (&values)[Values], int lane, int width) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance >= width) break;
#pragma unroll
    for (int j = 0; j < Values; ++j) {
      const float other = __shfl_xor_sync(~0u, values[j], distance);
      values[j] = (lane & distance) != 0 ? other - values[j] : values[j] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < Values; step *= 2) {
    if (32 * step >= width) break;
#pragma unroll
    for (int j = 0; j < Values; ++j) {
      if ((j & step) != 0) continue;
      const float low = values[j], high = values[j + step];
      values[j] = low + high;
      values[j + step] = low - high;
    }
  }
}

}  // namespace w4q::kernels
