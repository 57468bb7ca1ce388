// Activations of one value that few models have, the same on the CPU and on a GPU: what gates.h lists from relu on.
#pragma once

#include <cmath>

#include "core/host_device.h"
#include "kernels/elementwise/gates.h"

namespace w4q::kernels {

/// x · tanh(softplus(x)).
W4Q_HOST_DEVICE inline Activated mish_at(float x) {
  const float t = tanhf(x > 20.0f ? x : log1pf(expf(x))), s = 1.0f / (1.0f + expf(-x));
  return {x * t, t + x * (1.0f - t * t) * s};
}

/// x · relu6(x + 3) / 6.
W4Q_HOST_DEVICE inline Activated hard_swish_at(float x) {
  if (x <= -3.0f) return {0.0f, 0.0f};
  if (x >= 3.0f) return {x, 1.0f};
  return {x * (x + 3.0f) / 6.0f, (2.0f * x + 3.0f) / 6.0f};
}

/// x / (1 + e^−1.702x).
W4Q_HOST_DEVICE inline Activated quick_gelu_at(float x) {
  constexpr float steepness = 1.702f;
  const float s = 1.0f / (1.0f + expf(-steepness * x));
  return {x * s, s + steepness * x * s * (1.0f - s)};
}

W4Q_HOST_DEVICE inline Activated plain_activation_at(Activation activation, float x) {
  switch (activation) {
    case Activation::relu:
      return {x > 0.0f ? x : 0.0f, x > 0.0f ? 1.0f : 0.0f};
    case Activation::relu_squared:
      return {x > 0.0f ? x * x : 0.0f, x > 0.0f ? 2.0f * x : 0.0f};
    case Activation::relu6:
      return {x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x, x > 0.0f && x < 6.0f ? 1.0f : 0.0f};
    case Activation::leaky_relu:
      return {x > 0.0f ? x : 0.01f * x, x > 0.0f ? 1.0f : 0.01f};
    case Activation::sigmoid: {
      const float s = 1.0f / (1.0f + expf(-x));
      return {s, s * (1.0f - s)};
    }
    case Activation::tanh: {
      const float t = tanhf(x);
      return {t, 1.0f - t * t};
    }
    case Activation::quick_gelu:
      return quick_gelu_at(x);
    case Activation::mish:
      return mish_at(x);
    case Activation::hard_swish:
      return hard_swish_at(x);
    default:
      return {x, 1.0f};  // linear
  }
}

/// Whether plain_activation_at has it.
W4Q_HOST_DEVICE inline bool is_plain_activation(Activation activation) { return activation >= Activation::relu; }

}  // namespace w4q::kernels
