#pragma once

namespace w4q::kernels {

constexpr float largest_half = 65504.0f;

/// silu(gate) · up, kept within the range of f16.
__device__ __forceinline__ float silu_product(float gate, float up) {
  const float value = gate / (1.0f + __expf(fminf(-gate, 88.0f))) * up;
  return fminf(fmaxf(value, -largest_half), largest_half);
}

}  // namespace w4q::kernels
