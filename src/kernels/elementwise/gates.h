// What gated MLPs do to the products of their gates and ups.
#pragma once

#include "core/views.h"

namespace w4q::kernels {

enum class Activation {
  silu,            ///< silu(gate) · up, silu(x) = x / (1 + e^−x)
  gelu_tanh,       ///< gelu(gate) · up, gelu(x) = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))
  gelu,            ///< gelu(gate) · up, gelu(x) = x/2 · (1 + erf(x/√2))
  clamped_swiglu,  ///< (up + 1) · gate / (1 + e^(−`slope` · gate)), gate at most `limit`, up within ± limit
  // Those of plain_activations.h, each f(gate) · up.
  relu,
  relu_squared,
  relu6,       ///< relu, at most 6
  leaky_relu,  ///< a hundredth of what is below zero
  sigmoid,
  tanh,
  quick_gelu,  ///< x / (1 + e^−1.702x)
  linear,
  mish,        ///< x · tanh(softplus(x))
  hard_swish,  ///< x · relu6(x + 3) / 6
};

struct Gating {
  Activation activation = Activation::silu;
  double limit = 0;      ///< clamped_swiglu
  double slope = 1.702;  ///< clamped_swiglu
};

/// An activation of x, and its derivative there.
struct Activated {
  float value, slope;
};
/// The activation of a gate alone.
Activated activated_gate(const Gating& gating, float x);

/// gate = activation(gate) · up, in fp32 and parallel over rows. Throws internal when the shapes differ.
void gate_multiply(const Gating& gating, MatrixView<float> gate, MatrixView<const float> up);

/// x = x / (1 + e^−x), and x = x · 1/(1 + e^−gate).
void silu(MatrixView<float> x);
void sigmoid_multiply(MatrixView<float> x, MatrixView<const float> gate);

/// The way back through gate_multiply(gating, gate, up): `gradient` of a loss by its result, those by what went in. Throws
/// internal when the shapes differ.
void gate_multiply_gradient(const Gating& gating, MatrixView<const float> gate, MatrixView<const float> up,
                            MatrixView<const float> gradient, MatrixView<float> by_gate, MatrixView<float> by_up);
/// The same of sigmoid_multiply(x, gate); `gradient` becomes that by x.
void sigmoid_multiply_gradient(MatrixView<const float> x, MatrixView<const float> gate, MatrixView<float> gradient,
                               MatrixView<float> by_gate);

}  // namespace w4q::kernels
