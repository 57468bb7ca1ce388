// y = x · Wᵀ + b with W 16-bit, fp32 or packed in the canonical layout of any scheme. Weights are decoded a block of
// rows at a time into fp32 scratch (class E2 against an fp64 product of the decoded weights).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/views.h"
#include "formats/packed.h"

namespace w4q::kernels {

/// The matrix of a linear layer. Exactly one of the two alternatives is held.
struct LinearWeight {
  /// Bytes of an f32, f16 or bf16 tensor [n, k]; `keep_alive` owns or maps them.
  struct Dense {
    TensorView view;
    std::shared_ptr<const void> keep_alive;
  };
  std::string name;  ///< module path
  int64_t n = 0;
  int64_t k = 0;
  std::variant<Dense, std::shared_ptr<const formats::PackedLinear>> matrix;
  std::vector<float> bias;  ///< empty, or n values
};

/// Decodes rows [begin, end) into `out`, (end − begin) × k: the weights that it computes with, input scale and
/// rotations undone.
void decode_rows(const LinearWeight& weight, int64_t begin, int64_t end, MatrixView<float> out);

/// y[m × n] = x[m × k] · Wᵀ + b. Where passes take a rotated input, x is rotated, not the weights. Parallel over blocks
/// of rows of W; the result does not depend on the thread count. Throws internal when the shapes do not fit.
void linear(const LinearWeight& weight, MatrixView<const float> x, MatrixView<float> y);

/// The way back through linear(): from `gradient` [m × n] of a loss by y to that by x, out[m × k] = gradient · W. Weights
/// are decoded some rows at a time; the result does not depend on the thread count. Throws internal when the shapes do
/// not fit.
void linear_gradient(const LinearWeight& weight, MatrixView<const float> gradient, MatrixView<float> out);

/// Whether there is a product with int8 activations for it (int8_rows.h).
bool takes_int8_activations(const LinearWeight& weight) noexcept;
/// linear() with rows of x, after the input scale, rounded to int8. Throws internal for weights that take none.
void linear_int8(const LinearWeight& weight, MatrixView<const float> x, MatrixView<float> y);

}  // namespace w4q::kernels
