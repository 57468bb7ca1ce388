// Activation-aware quantization (docs/awq.md): input channels that carry large activations are scaled up before
// rounding and divided out of the input, then each block of weights is clipped. Both are chosen by the error of the
// layer's output on calibration activations, ‖(W − Ŵ)·xᵀ‖² averaged over rows x, which the Gram matrix G = mean xᵀx
// gives as tr(E·G·Eᵀ).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "quantize/rounding.h"

namespace w4q::quantize {

/// One linear layer of a group that reads one input.
struct AwqLinear {
  MatrixView<const float> weight;  ///< [n, k]
  Rounding rounding;
};

/// What is known of that input.
struct AwqInput {
  std::span<const float> mean_abs;  ///< [k]
  MatrixView<const float> gram;     ///< [k, k], symmetric
  /// Channels that must get the same scale have the same number here, 0 … k−1; empty: each has its own.
  std::span<const int32_t> shared;
};

struct AwqScales {
  std::vector<float> scales;  ///< [k], all positive: multiply the columns of the weights, divide the input
  double alpha = 0;           ///< the point of the search that won; 0 means that nothing is scaled
  double error = 0;           ///< mean squared error of the outputs of the group, summed over outputs
  double plain_error = 0;     ///< the same without scales
};

/// Points of the search: scales are mean_abs^α for α = 0, 1/20 … 19/20.
inline constexpr int awq_points = 20;

/// Searches the scales of one group among the first `points` points; with 1, only the error of no scales is taken.
/// Never worse than no scales. The result does not depend on the number of threads. Throws internal when shapes do not
/// fit.
AwqScales search_scales(std::span<const AwqLinear> linears, const AwqInput& input, int points = awq_points);

/// The scales of one point: mean_abs^α, shared where asked, normalized to √(smallest · largest) = 1.
std::vector<float> awq_scales_at(const AwqInput& input, double alpha);

struct AwqClip {
  double error = 0;  ///< mean squared error of the output
  double plain_error = 0;
  int64_t clipped_blocks = 0;
};

/// Clips each block of weights that share a scale to a share of its range (1, 0.95 … 0.5), block after block, where
/// that lessens the error of the row's output given what the other blocks do. Changes `weight` in place: rounding it
/// then gives the error that is returned. `gram` belongs to the input of `weight` as it is, after scaling.
AwqClip search_clip(MatrixView<float> weight, MatrixView<const float> gram, const Rounding& rounding);

/// tr(E·G·Eᵀ) with E [rows, k].
double output_error(MatrixView<const float> difference, MatrixView<const float> gram);

}  // namespace w4q::quantize
