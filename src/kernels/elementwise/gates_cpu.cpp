#include "kernels/elementwise/gates.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/plain_activations.h"

namespace w4q::kernels {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

constexpr float gelu_slope = 0.7978845608028654f;  // √(2/π)
constexpr float gelu_cube = 0.044715f;

float gelu_tanh(float x) { return 0.5f * x * (1.0f + std::tanh(gelu_slope * (x + gelu_cube * x * x * x))); }

constexpr float root_half = 0.70710678118654752f;  // √½

float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * root_half)); }

Activated silu_at(float x) {
  const float s = sigmoid(x);
  return {x * s, s * (1.0f + x * (1.0f - s))};
}

Activated gelu_tanh_at(float x) {
  const float t = std::tanh(gelu_slope * (x + gelu_cube * x * x * x));
  const float inner = gelu_slope * (1.0f + 3.0f * gelu_cube * x * x);
  return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
}

Activated gelu_at(float x) {
  constexpr float density = 0.3989422804014327f;  // 1/√(2π)
  const float share = 0.5f * (1.0f + std::erf(x * root_half));
  return {x * share, share + x * density * std::exp(-0.5f * x * x)};
}

Activated clamped_swish_at(float x, float limit, float slope) {
  const float clamped = std::min(x, limit), s = sigmoid(clamped * slope);
  return {clamped * s, x > limit ? 0.0f : s + clamped * slope * s * (1.0f - s)};
}

/// Calls body(row) for all rows of `cols` values in parallel.
template <class Body>
void for_gate_rows(int64_t rows, int64_t cols, const Body& body) {
  parallel_for(rows, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

/// values[i] = body(values[i], others[i]) in all rows.
template <class Body>
void for_values(MatrixView<float> values, MatrixView<const float> others, const Body& body) {
  ensure(values.rows == others.rows && values.cols == others.cols, "gates: shapes differ");
  for_gate_rows(values.rows, values.cols, [&](int64_t r) {
    float* const value = values.row(r);
    const float* const other = others.row(r);
    for (int64_t c = 0; c < values.cols; ++c) value[c] = body(value[c], other[c]);
  });
}

bool same_shape(MatrixView<const float> a, MatrixView<const float> b) { return a.rows == b.rows && a.cols == b.cols; }

}  // namespace

Activated activated_gate(const Gating& gating, float x) {
  if (is_plain_activation(gating.activation)) return plain_activation_at(gating.activation, x);
  switch (gating.activation) {
    case Activation::gelu_tanh:
      return gelu_tanh_at(x);
    case Activation::gelu:
      return gelu_at(x);
    case Activation::clamped_swiglu:
      return clamped_swish_at(x, static_cast<float>(gating.limit), static_cast<float>(gating.slope));
    default:
      return silu_at(x);
  }
}

void gate_multiply(const Gating& gating, MatrixView<float> gate, MatrixView<const float> up) {
  const auto limit = static_cast<float>(gating.limit), slope = static_cast<float>(gating.slope);
  switch (gating.activation) {
    case Activation::silu:
      return silu_multiply(gate, up);
    case Activation::gelu_tanh:
      return for_values(gate, up, [](float g, float u) { return gelu_tanh(g) * u; });
    case Activation::gelu:
      return for_values(gate, up, [](float g, float u) { return gelu(g) * u; });
    case Activation::clamped_swiglu:
      return for_values(gate, up, [limit, slope](float g, float u) {
        const float clamped = std::min(g, limit);
        return (std::clamp(u, -limit, limit) + 1.0f) * (clamped * sigmoid(clamped * slope));
      });
    default:
      return for_values(gate, up, [activation = gating.activation](float g, float u) {
        return plain_activation_at(activation, g).value * u;
      });
  }
}

void silu(MatrixView<float> x) {
  for_values(x, x, [](float value, float) { return value * sigmoid(value); });
}

void sigmoid_multiply(MatrixView<float> x, MatrixView<const float> gate) {
  for_values(x, gate, [](float value, float g) { return value * sigmoid(g); });
}

void gate_multiply_gradient(const Gating& gating, MatrixView<const float> gate, MatrixView<const float> up,
                            MatrixView<const float> gradient, MatrixView<float> by_gate, MatrixView<float> by_up) {
  ensure(same_shape(gate, up) && same_shape(gate, gradient) && same_shape(gate, by_gate) && same_shape(gate, by_up),
         "gate_multiply_gradient: shapes differ");
  const auto limit = static_cast<float>(gating.limit);
  const bool clamps = gating.activation == Activation::clamped_swiglu;
  for_gate_rows(gate.rows, gate.cols, [&](int64_t r) {
    for (int64_t c = 0; c < gate.cols; ++c) {
      const float g = gate.row(r)[c], u = up.row(r)[c], by = gradient.row(r)[c];
      const Activated at = activated_gate(gating, g);
      const bool moves = !clamps || (u >= -limit && u <= limit);
      by_gate.row(r)[c] = by * at.slope * (clamps ? std::clamp(u, -limit, limit) + 1.0f : u);
      by_up.row(r)[c] = moves ? by * at.value : 0.0f;
    }
  });
}

void sigmoid_multiply_gradient(MatrixView<const float> x, MatrixView<const float> gate, MatrixView<float> gradient,
                               MatrixView<float> by_gate) {
  ensure(same_shape(x, gate) && same_shape(x, gradient) && same_shape(x, by_gate),
         "sigmoid_multiply_gradient: shapes differ");
  for_gate_rows(x.rows, x.cols, [&](int64_t r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      const float s = sigmoid(gate.row(r)[c]), by = gradient.row(r)[c];
      by_gate.row(r)[c] = by * x.row(r)[c] * s * (1.0f - s);
      gradient.row(r)[c] = by * s;
    }
  });
}

}  // namespace w4q::kernels
