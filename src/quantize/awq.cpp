#include "quantize/awq.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/gemm.h"

namespace w4q::quantize {
namespace {

/// Rows of a weight that one task scales, rounds and multiplies: results must not depend on threads, so it is fixed.
constexpr int64_t row_block = 64;
/// Channels without activations count as if they had this share of the largest: text that does use them will come.
constexpr float smallest_share = 1e-4f;

/// fp32 scratch of one task.
struct Matrix {
  Matrix(int64_t rows, int64_t cols) : values(static_cast<size_t>(rows * cols)), view(values.data(), rows, cols) {}
  std::vector<float> values;
  MatrixView<float> view;
};

double dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// Calls body(first, rows) for blocks of rows in parallel and adds what it returns in order of the blocks.
template <class Body>
double sum_over_rows(int64_t rows, const Body& body) {
  std::vector<double> sums(static_cast<size_t>((rows + row_block - 1) / row_block));
  parallel_for(rows, row_block, [&](int64_t begin, int64_t end) {
    sums[static_cast<size_t>(begin / row_block)] = body(begin, end - begin);
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

/// The error of one block of rows after scaling, rounding and undoing the scale.
double scaled_error(const AwqLinear& linear, int64_t first, int64_t rows, std::span<const float> scales,
                    MatrixView<const float> gram) {
  const int64_t k = linear.weight.cols;
  Matrix rounded(rows, k);
  for (int64_t r = 0; r < rows; ++r) {
    const float* weights = linear.weight.row(first + r);
    float* out = rounded.view.row(r);
    for (int64_t c = 0; c < k; ++c) out[c] = weights[c] * scales[static_cast<size_t>(c)];
  }
  linear.rounding.round(rounded.view);
  for (int64_t r = 0; r < rows; ++r) {
    const float* weights = linear.weight.row(first + r);
    float* out = rounded.view.row(r);
    for (int64_t c = 0; c < k; ++c) out[c] = weights[c] - out[c] / scales[static_cast<size_t>(c)];
  }
  return output_error(rounded.view, gram);
}

double group_error(std::span<const AwqLinear> linears, std::span<const float> scales, MatrixView<const float> gram) {
  double error = 0;
  for (const AwqLinear& linear : linears) {
    error += sum_over_rows(linear.weight.rows, [&](int64_t first, int64_t rows) {
      return scaled_error(linear, first, rows, scales, gram);
    });
  }
  return error;
}

/// mean_abs, averaged over channels that share a scale and kept away from zero.
std::vector<float> importance(const AwqInput& input) {
  std::vector<float> result(input.mean_abs.begin(), input.mean_abs.end());
  if (!input.shared.empty()) {
    std::vector<double> sums(result.size());
    std::vector<int64_t> counts(result.size());
    for (size_t c = 0; c < result.size(); ++c) {
      sums[static_cast<size_t>(input.shared[c])] += result[c];
      ++counts[static_cast<size_t>(input.shared[c])];
    }
    for (size_t c = 0; c < result.size(); ++c) {
      const auto group = static_cast<size_t>(input.shared[c]);
      result[c] = static_cast<float>(sums[group] / static_cast<double>(counts[group]));
    }
  }
  const float largest = *std::max_element(result.begin(), result.end());
  for (float& value : result) value = largest > 0 ? std::max(value, smallest_share * largest) : 1.0f;
  return result;
}

/// One block of columns of some rows: which clip is best, given the error of everything else.
class ClipSearch {
 public:
  ClipSearch(MatrixView<float> weight, MatrixView<const float> gram, const Rounding& rounding)
      : weight_(weight),
        gram_(gram),
        rounding_(rounding),
        error_(weight.rows, weight.cols),
        product_(weight.rows, weight.cols) {
    copy(weight_, error_.view);
    rounding_.round(error_.view);
    for (int64_t r = 0; r < weight_.rows; ++r) subtract_from(weight_.row(r), error_.view.row(r), weight_.cols);
    kernels::gemm_nn(error_.view, gram_, product_.view);
  }

  double total() const {
    double sum = 0;
    for (int64_t r = 0; r < weight_.rows; ++r) sum += dot(error_.view.row(r), product_.view.row(r), weight_.cols);
    return sum;
  }

  /// Chooses and applies the clips of columns [begin, begin + cols); returns how many rows were clipped.
  int64_t run(int64_t begin, int64_t cols) {
    const int64_t rows = weight_.rows;
    const MatrixView<const float> diagonal(gram_.row(begin) + begin, cols, cols, gram_.stride);
    Matrix change(rows, cols), best_change(rows, cols), spread(rows, cols);
    std::vector<double> best(static_cast<size_t>(rows), 0.0);
    std::vector<float> best_share(static_cast<size_t>(rows), 1.0f);
    for (int step = 1; step <= clip_steps; ++step) {
      const float share = 1.0f - clip_step * static_cast<float>(step);
      clipped_errors(begin, share, change.view);
      kernels::gemm_nn(change.view, diagonal, spread.view);
      for (int64_t r = 0; r < rows; ++r) {
        const float* d = change.view.row(r);
        const double gain = 2 * dot(d, product_.view.row(r) + begin, cols) + dot(d, spread.view.row(r), cols);
        if (!(gain < best[static_cast<size_t>(r)])) continue;
        best[static_cast<size_t>(r)] = gain;
        best_share[static_cast<size_t>(r)] = share;
        std::copy_n(d, cols, best_change.view.row(r));
      }
    }
    return apply(begin, best_share, best_change.view);
  }

 private:
  static constexpr int clip_steps = 10;
  static constexpr float clip_step = 0.05f;

  static void copy(MatrixView<const float> from, MatrixView<float> to) {
    for (int64_t r = 0; r < from.rows; ++r) std::copy_n(from.row(r), from.cols, to.row(r));
  }
  /// values = from − values.
  static void subtract_from(const float* from, float* values, int64_t count) {
    for (int64_t c = 0; c < count; ++c) values[c] = from[c] - values[c];
  }
  /// Zero always stays representable: a block of one sign is clipped at its far end only.
  void clip(const float* weights, int64_t count, float share, float* out) const {
    float low = 0, high = 0;
    for (int64_t c = 0; c < count; ++c) low = std::min(low, weights[c]), high = std::max(high, weights[c]);
    if (rounding_.symmetric) low = std::min(low, -high), high = -low;
    low *= share;
    high *= share;
    for (int64_t c = 0; c < count; ++c) out[c] = std::clamp(weights[c], low, high);
  }

  /// How the error of a block changes when it is clipped to `share` of its range.
  void clipped_errors(int64_t begin, float share, MatrixView<float> change) const {
    for (int64_t r = 0; r < change.rows; ++r) clip(weight_.row(r) + begin, change.cols, share, change.row(r));
    rounding_.round(change);
    for (int64_t r = 0; r < change.rows; ++r) {
      subtract_from(weight_.row(r) + begin, change.row(r), change.cols);
      const float* error = error_.view.row(r) + begin;
      for (int64_t c = 0; c < change.cols; ++c) change.row(r)[c] -= error[c];
    }
  }

  int64_t apply(int64_t begin, const std::vector<float>& shares, MatrixView<const float> change) {
    int64_t clipped = 0;
    for (int64_t r = 0; r < change.rows; ++r) {
      const float share = shares[static_cast<size_t>(r)];
      if (share == 1.0f) continue;
      ++clipped;
      clip(weight_.row(r) + begin, change.cols, share, weight_.row(r) + begin);
      for (int64_t c = 0; c < change.cols; ++c) error_.view.row(r)[begin + c] += change.row(r)[c];
    }
    const MatrixView<const float> columns(gram_.row(begin), change.cols, gram_.cols, gram_.stride);
    if (clipped > 0) kernels::gemm_nn(change, columns, product_.view, kernels::Accumulate::yes);
    return clipped;
  }

  MatrixView<float> weight_;
  MatrixView<const float> gram_;
  const Rounding& rounding_;
  Matrix error_, product_;  // E and E·G of the weights as they are now
};

void check_shapes(std::span<const AwqLinear> linears, const AwqInput& input) {
  const auto k = static_cast<int64_t>(input.mean_abs.size());
  bool fits = k > 0 && input.gram.rows == k && input.gram.cols == k && !linears.empty();
  for (const AwqLinear& linear : linears) fits = fits && linear.weight.cols == k;
  fits = fits && (input.shared.empty() || static_cast<int64_t>(input.shared.size()) == k);
  for (const int32_t channel : input.shared) fits = fits && channel >= 0 && channel < k;
  ensure(fits, "search_scales: shapes do not fit");
}

}  // namespace

double output_error(MatrixView<const float> difference, MatrixView<const float> gram) {
  Matrix product(difference.rows, difference.cols);
  kernels::gemm_nn(difference, gram, product.view);
  double error = 0;
  for (int64_t r = 0; r < difference.rows; ++r) error += dot(difference.row(r), product.view.row(r), difference.cols);
  return error;
}

std::vector<float> awq_scales_at(const AwqInput& input, double alpha) {
  std::vector<float> scales = importance(input);
  for (float& value : scales) value = static_cast<float>(std::pow(static_cast<double>(value), alpha));
  const auto [smallest, largest] = std::minmax_element(scales.begin(), scales.end());
  const float middle = std::sqrt(*smallest * *largest);
  for (float& value : scales) value /= middle;
  return scales;
}

AwqScales search_scales(std::span<const AwqLinear> linears, const AwqInput& input, int points) {
  check_shapes(linears, input);
  AwqScales best;
  for (int point = 0; point < points; ++point) {
    const double alpha = static_cast<double>(point) / awq_points;
    auto scales = awq_scales_at(input, alpha);
    const double error = group_error(linears, scales, input.gram);
    if (point == 0) best.plain_error = error;
    if (point > 0 && !(error < best.error)) continue;
    best.scales = std::move(scales);
    best.alpha = alpha;
    best.error = error;
  }
  return best;
}

AwqClip search_clip(MatrixView<float> weight, MatrixView<const float> gram, const Rounding& rounding) {
  const int64_t block = rounding.block;
  ensure(gram.rows == weight.cols && gram.cols == weight.cols && block > 0, "search_clip: shapes do not fit");
  const int64_t tasks = (weight.rows + row_block - 1) / row_block;
  std::vector<AwqClip> parts(static_cast<size_t>(tasks));
  parallel_for(weight.rows, row_block, [&](int64_t first, int64_t end) {
    AwqClip& part = parts[static_cast<size_t>(first / row_block)];
    ClipSearch search({weight.row(first), end - first, weight.cols, weight.stride}, gram, rounding);
    part.plain_error = search.total();
    for (int64_t begin = 0; begin < weight.cols; begin += block) {
      part.clipped_blocks += search.run(begin, std::min(block, weight.cols - begin));
    }
    part.error = search.total();
  });
  AwqClip sum;
  for (const AwqClip& part : parts) {
    sum.error += part.error;
    sum.plain_error += part.plain_error;
    sum.clipped_blocks += part.clipped_blocks;
  }
  return sum;
}

}  // namespace w4q::quantize
