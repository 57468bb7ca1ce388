// What a calibration run remembers of the inputs of linear layers: sums over activation rows that add up over windows,
// files and machines.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/host_device.h"
#include "core/views.h"

namespace w4q::quantize {

class GramCuda;

/// Sums over the rows [rows, k] that a linear layer has seen. Linears that read the same input share one.
struct InputStatistics {
  int64_t width = 0;                ///< input channels, k
  int64_t count = 0;                ///< rows
  std::vector<double> sum_abs;      ///< [k], Σ |x|
  std::vector<double> sum_squares;  ///< [k], Σ x²
  /// Σ xᵀx, the upper triangle row by row: (0,0) … (0,k−1), (1,1) …, triangle_size(k) values. Empty where nobody asked.
  std::vector<double> gram;
  std::shared_ptr<GramCuda> gpu_gram;  ///< its mean instead, where it was made and is used: in GPU memory

  bool has_gram() const noexcept { return !gram.empty() || gpu_gram != nullptr; }
  /// Σ |x| / count and Σ x² / count; zeros when nothing was seen.
  std::vector<float> mean_abs() const;
  std::vector<float> mean_squares() const;
};

/// Values of the upper triangle of a k × k matrix.
constexpr int64_t triangle_size(int64_t k) noexcept { return k * (k + 1) / 2; }
/// Where row i, which begins on the diagonal, starts in it.
constexpr int64_t triangle_row(int64_t k, int64_t i) noexcept { return i * k - i * (i - 1) / 2; }

/// The symmetric matrix [k, k] of an upper triangle.
std::vector<float> expand_triangle(std::span<const float> triangle, int64_t k);

/// Tokens of a number that is fitted to them of which it is as much noise as not, measured (docs/notes/quality.md): of moves
/// of targets and costs of pairs of outputs …
inline constexpr double noise_of_gradients = 24;
/// … and of products of two inputs.
inline constexpr double noise_of_inputs = 4;
/// What is worth believing of numbers that are fitted to so many tokens, `width` of them together.
inline double supported_share(int64_t tokens, int64_t width, double noise = noise_of_gradients) {
  return static_cast<double>(tokens) / (static_cast<double>(tokens) + noise * static_cast<double>(width));
}
/// That share of a mean, rounded once.
W4Q_HOST_DEVICE inline float supported_mean(float mean, double share) {
  return static_cast<float>(share * static_cast<double>(mean));
}

/// Of a mean over tokens, the upper triangle of [width, width]: that share of what is off the diagonal.
void support_by_tokens(std::span<float> triangle, int64_t width, int64_t tokens);

/// Sums of nothing.
InputStatistics make_statistics(int64_t width, bool with_gram);

/// Adds rows of activations. Products in fp32 over at most 512 rows, sums of them in fp64; the result does not depend
/// on the number of threads. Throws bad_file naming `name` when a value is not finite, mismatch for another width.
void add_rows(InputStatistics& statistics, MatrixView<const float> rows, std::string_view name);

/// sums[i · k + j] += Σ left[r][i] · right[r][j] over rows [rows, k]; products in fp32 over at most 512 rows, as
/// add_rows().
void add_products(MatrixView<const float> left, MatrixView<const float> right, std::span<double> sums);

/// Throws bad_file naming `name` and the channel when a sum of squares is not finite.
void check_finite(const InputStatistics& statistics, std::string_view name);

/// Adds the sums of another run. Throws mismatch naming `name` when widths differ or only one has a Gram matrix.
void merge(InputStatistics& statistics, const InputStatistics& other, std::string_view name);

/// What a sum of products is on average, `scale` being one over their count: the sum passes through fp32, as which a file of
/// statistics keeps it, so that what is rounded is the same with a file and without, on CPUs and GPUs.
W4Q_HOST_DEVICE inline float mean_of_sum(double sum, double scale) {
  return static_cast<float>(static_cast<double>(static_cast<float>(sum)) * scale);
}

/// The mean of xᵀx (mean_of_sum) as a full symmetric k × k matrix in fp32, row-major; without a Gram matrix only its
/// diagonal is known and the rest is zero.
std::vector<float> mean_gram(const InputStatistics& statistics);
/// What weights are rounded by: that mean, of which as much counts off the diagonal as its tokens support. A matrix of few
/// tokens says of directions that they hardly saw that errors cost nothing there.
std::vector<float> supported_gram(const InputStatistics& statistics);

}  // namespace w4q::quantize
