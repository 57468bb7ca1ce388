// The activations of gated MLPs, one value at a time.
#pragma once

#include <cuda_fp16.h>

#include "kernels/elementwise/gates.h"
#include "kernels/elementwise/plain_activations.h"

namespace w4q::kernels {

inline constexpr float swiglu_slope = 1.702f, gelu_slope = 0.7978845608028654f, root_half = 0.70710678118654752f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// Within the range of f16.
__device__ __forceinline__ __half narrow(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

__device__ __forceinline__ float gated(Activation activation, float limit, float gate, float up) {
  if (activation == Activation::silu) return gate * sigmoid(gate) * up;
  if (activation == Activation::gelu_tanh) {
    return 0.5f * gate * (1.0f + tanhf(gelu_slope * (gate + 0.044715f * gate * gate * gate))) * up;
  }
  if (activation == Activation::gelu) return 0.5f * gate * (1.0f + erff(gate * root_half)) * up;
  if (is_plain_activation(activation)) return plain_activation_at(activation, gate).value * up;
  const float clamped = fminf(gate, limit);
  return (fminf(fmaxf(up, -limit), limit) + 1.0f) * (clamped * sigmoid(clamped * swiglu_slope));
}

}  // namespace w4q::kernels
