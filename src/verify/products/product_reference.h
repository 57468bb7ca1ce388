// What a product of linear layers should give, computed on the CPU: by its twin and in fp64.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/linear/linear.h"

namespace w4q::verify {

/// How a decoder uses a product: outputs side by side; added to the residual stream; silu(gate) · up of two.
enum class Use { plain, residual, gated };

/// Outputs of one weight, or of gate and up together, for some rows of activations.
struct ProductReference {
  int64_t column = 0;                  ///< where they begin in the product's
  int64_t n = 0;                       ///< outputs
  int64_t first = 0, count = 0;        ///< those of them that are known in fp64
  std::vector<float> cpu = {};         ///< [rows][n]
  std::vector<double> exact = {};      ///< [rows][count]
  std::vector<double> unrounded = {};  ///< with int8: of the activations as they were, and `exact` of their integers
};

/// Of `weights`, which read the same `x` [rows × k]; two where the use is gated. With `int8` as linear_int8 multiplies.
std::vector<ProductReference> make_references(std::span<const kernels::LinearWeight* const> weights, Use use,
                                              MatrixView<const float> x, bool int8);

/// Relative distances ‖found − expected‖ / ‖expected‖ of the first `rows`, of which `found` has row i at
/// `found + at[i] · stride`.
struct Distances {
  double to_cpu = 0, to_exact = 0, to_unrounded = 0;
};
Distances distances(const ProductReference& reference, std::span<const int64_t> at, const float* found, int64_t stride);

}  // namespace w4q::verify
