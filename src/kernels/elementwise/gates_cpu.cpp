#include "kernels/elementwise/gates.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"

namespace w4q::kernels {
namespace {

constexpr float swiglu_slope = 1.702f;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float gelu_tanh(float x) {
  constexpr float slope = 0.7978845608028654f;  // √(2/π)
  return 0.5f * x * (1.0f + std::tanh(slope * (x + 0.044715f * x * x * x)));
}

/// values[i] = body(values[i], others[i]) in all rows.
template <class Body>
void for_values(MatrixView<float> values, MatrixView<const float> others, const Body& body) {
  ensure(values.rows == others.rows && values.cols == others.cols, "gates: shapes differ");
  const int64_t rows = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, values.cols));
  parallel_for(values.rows, rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const value = values.row(r);
      const float* const other = others.row(r);
      for (int64_t c = 0; c < values.cols; ++c) value[c] = body(value[c], other[c]);
    }
  });
}

}  // namespace

void gate_multiply(const Gating& gating, MatrixView<float> gate, MatrixView<const float> up) {
  const auto limit = static_cast<float>(gating.limit);
  switch (gating.activation) {
    case Activation::silu:
      return silu_multiply(gate, up);
    case Activation::gelu_tanh:
      return for_values(gate, up, [](float g, float u) { return gelu_tanh(g) * u; });
    case Activation::clamped_swiglu:
      return for_values(gate, up, [limit](float g, float u) {
        const float clamped = std::min(g, limit);
        return (std::clamp(u, -limit, limit) + 1.0f) * (clamped * sigmoid(clamped * swiglu_slope));
      });
  }
}

void silu(MatrixView<float> x) {
  for_values(x, x, [](float value, float) { return value * sigmoid(value); });
}

void sigmoid_multiply(MatrixView<float> x, MatrixView<const float> gate) {
  for_values(x, gate, [](float value, float g) { return value * sigmoid(g); });
}

}  // namespace w4q::kernels
