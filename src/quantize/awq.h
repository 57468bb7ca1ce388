// Activation-aware quantization (docs/awq.md): input channels that carry large activations are scaled up before
// rounding and divided out of the input, then each block of weights is clipped. Both are chosen by the error of the
// layer's output on calibration activations, ‖(W − Ŵ)·xᵀ‖² averaged over rows x, which the Gram matrix G = mean xᵀx
// gives as tr(E·G·Eᵀ).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "quantize/rounding.h"

namespace w4q::quantize {

/// One linear layer of a group that reads one input.
struct AwqLinear {
  MatrixView<const float> weight;  ///< [n, k]
  Rounding rounding;
};

/// Error feedback that follows the scales (feedback.h).
struct AwqFeedback {
  int64_t block;          ///< columns that share a scale
  double damping;         ///< as ErrorFactor has it
  std::string_view name;  ///< of the group, for errors
};

/// What is known of that input.
struct AwqInput {
  std::span<const float> mean_abs;  ///< [k]
  MatrixView<const float> gram;     ///< [k, k], symmetric
  /// Channels that must get the same scale have the same number here, 0 … k−1; empty: each has its own.
  std::span<const int32_t> shared;
  /// [k] ChannelMagnitudes of the weights; empty: no scales that divide by them are tried.
  std::span<const float> magnitudes;
  /// Where feedback follows, candidates are judged by what it leaves of their errors, Σ_j D_j·|e_j|² with the pivots D of
  /// G (error_factor.h): the rest of tr(E·G·Eᵀ) other columns make up for. Not for linears that are rounded in another basis.
  std::optional<AwqFeedback> feedback = std::nullopt;
};

/// How large the weights are that an input channel meets: the mean over outputs of |w| as a share of the largest of its
/// block. The result does not depend on the number of threads.
class ChannelMagnitudes {
 public:
  explicit ChannelMagnitudes(int64_t k) : sums_(static_cast<size_t>(k)) {}
  /// A weight [n, k] of f32, f16 or bf16 whose rows are rounded in blocks.
  void add(const TensorView& weight, int64_t block);
  std::vector<float> mean() const;

 private:
  std::vector<double> sums_;
  int64_t rows_ = 0;
};

/// Scales of mean_abs^α, or of mean_abs^α / magnitudes^(1 − α): where weights are small beside their neighbours, loud
/// activations are not all that counts (the second form is AutoAWQ's).
struct AwqPoint {
  double alpha = 0;
  bool by_weights = false;
  /// Whether anything is scaled.
  bool scales() const noexcept { return alpha > 0 || by_weights; }
};

struct AwqScales {
  std::vector<float> scales;  ///< [k], all positive: multiply the columns of the weights, divide the input
  AwqPoint point;             ///< that won
  double error = 0;           ///< mean squared error of the outputs of the group, summed over outputs, before feedback
  double plain_error = 0;     ///< the same without scales
};

/// Points of the search: α = 0, 1/20 … 19/20 of the first form, then of the second where there are magnitudes.
inline constexpr int awq_alphas = 20;
std::vector<AwqPoint> awq_points(const AwqInput& input);

/// Searches the scales of one group. Never worse than no scales by what they are judged by. The result does not depend on
/// the number of threads. Throws internal when shapes do not fit.
AwqScales search_scales(std::span<const AwqLinear> linears, const AwqInput& input);

/// Mean squared error of the outputs of a linear that is rounded without scales.
double plain_error(const AwqLinear& linear, MatrixView<const float> gram);

/// The pivots of a factor by channels, [k].
std::vector<float> pivots_of_channels(std::span<const int32_t> order, std::span<const float> pivots);

/// The scales of one point, shared where asked, normalized to √(smallest · largest) = 1.
std::vector<float> awq_scales_at(const AwqInput& input, AwqPoint point);

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
