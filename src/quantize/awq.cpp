#include "quantize/awq.h"

#include <algorithm>
#include <cmath>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"
#include "quantize/error_factor.h"

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

/// What one block of rows misses the weights by after scaling, rounding and undoing the scale.
Matrix scaled_errors(const AwqLinear& linear, int64_t first, int64_t rows, std::span<const float> scales) {
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
  return rounded;
}

/// Σ of error(errors of some rows) over all rows of a group under scales.
template <class Error>
double group_error(std::span<const AwqLinear> linears, std::span<const float> scales, const Error& error) {
  double sum = 0;
  for (const AwqLinear& linear : linears) {
    sum += sum_over_rows(linear.weight.rows, [&](int64_t first, int64_t rows) {
      return error(scaled_errors(linear, first, rows, scales).view);
    });
  }
  return sum;
}

/// What candidates are judged by.
class Judge {
 public:
  explicit Judge(const AwqInput& input) : gram_(input.gram) {
    if (!input.feedback) return;
    const auto& [block, damping, name] = *input.feedback;
    const ErrorFactor factor(gram_, block, damping, name);
    pivots_ = pivots_of_channels(factor.order(), factor.pivots());
  }

  bool by_outputs() const noexcept { return pivots_.empty(); }
  double operator()(MatrixView<const float> errors) const {
    if (by_outputs()) return output_error(errors, gram_);
    double sum = 0;
    for (int64_t r = 0; r < errors.rows; ++r) {
      const float* const row = errors.row(r);
      for (int64_t c = 0; c < errors.cols; ++c) {
        const double error = row[c];
        sum += double{pivots_[static_cast<size_t>(c)]} * error * error;
      }
    }
    return sum;
  }

 private:
  MatrixView<const float> gram_;
  std::vector<float> pivots_;
};

/// Values of channels, averaged over those that share a scale.
std::vector<float> shared_means(std::span<const float> values, std::span<const int32_t> shared) {
  std::vector<float> result(values.begin(), values.end());
  if (shared.empty()) return result;
  std::vector<double> sums(result.size());
  std::vector<int64_t> counts(result.size());
  for (size_t c = 0; c < result.size(); ++c) {
    sums[static_cast<size_t>(shared[c])] += result[c];
    ++counts[static_cast<size_t>(shared[c])];
  }
  for (size_t c = 0; c < result.size(); ++c) {
    const auto group = static_cast<size_t>(shared[c]);
    result[c] = static_cast<float>(sums[group] / static_cast<double>(counts[group]));
  }
  return result;
}

/// The same, kept away from zero.
std::vector<float> importance(std::span<const float> values, std::span<const int32_t> shared) {
  std::vector<float> result = shared_means(values, shared);
  const float largest = *std::max_element(result.begin(), result.end());
  for (float& value : result) value = largest > 0 ? std::max(value, smallest_share * largest) : 1.0f;
  return result;
}

/// sums[c] += |row[c]| as a share of the largest of its block.
void add_shares(std::span<const float> row, int64_t block, std::span<double> sums) {
  const auto step = static_cast<size_t>(block);
  for (size_t begin = 0; begin < row.size(); begin += step) {
    const size_t end = std::min(row.size(), begin + step);
    float largest = 0;
    for (size_t c = begin; c < end; ++c) largest = std::max(largest, std::abs(row[c]));
    if (largest == 0) continue;
    for (size_t c = begin; c < end; ++c) sums[c] += std::abs(row[c]) / largest;
  }
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
  fits = fits && (input.magnitudes.empty() || static_cast<int64_t>(input.magnitudes.size()) == k);
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

void ChannelMagnitudes::add(const TensorView& weight, int64_t block) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  ensure(k == static_cast<int64_t>(sums_.size()) && block > 0, "ChannelMagnitudes: shapes do not fit");
  const size_t row_bytes = weight.bytes.size() / static_cast<size_t>(n);
  // Partial sums of so many rows, added in their order.
  constexpr int64_t rows = 1024;
  std::vector<std::vector<double>> parts(static_cast<size_t>((n + rows - 1) / rows));
  parallel_for(n, rows, [&](int64_t begin, int64_t end) {
    std::vector<double>& part = parts[static_cast<size_t>(begin / rows)];
    part.resize(sums_.size());
    std::vector<float> row(sums_.size());
    for (int64_t r = begin; r < end; ++r) {
      widen(weight.bytes.subspan(static_cast<size_t>(r) * row_bytes, row_bytes), weight.dtype, row);
      add_shares(row, block, part);
    }
  });
  for (const auto& part : parts) {
    for (size_t c = 0; c < part.size(); ++c) sums_[c] += part[c];
  }
  rows_ += n;
}

std::vector<float> ChannelMagnitudes::mean() const {
  std::vector<float> result(sums_.size());
  for (size_t c = 0; c < result.size(); ++c) {
    result[c] = static_cast<float>(sums_[c] / static_cast<double>(std::max<int64_t>(rows_, 1)));
  }
  return result;
}

std::vector<AwqPoint> awq_points(const AwqInput& input) {
  std::vector<AwqPoint> points;
  for (const bool by_weights : {false, true}) {
    if (by_weights && input.magnitudes.empty()) continue;
    for (int i = 0; i < awq_alphas; ++i) points.push_back({static_cast<double>(i) / awq_alphas, by_weights});
  }
  return points;
}

std::vector<float> awq_scales_at(const AwqInput& input, AwqPoint point) {
  std::vector<float> scales = importance(input.mean_abs, input.shared);
  for (float& value : scales) value = static_cast<float>(std::pow(static_cast<double>(value), point.alpha));
  if (point.by_weights) {
    const auto magnitudes = importance(input.magnitudes, input.shared);
    for (size_t c = 0; c < scales.size(); ++c) {
      scales[c] = static_cast<float>(scales[c] / std::pow(static_cast<double>(magnitudes[c]), 1 - point.alpha));
    }
  }
  const auto [smallest, largest] = std::minmax_element(scales.begin(), scales.end());
  const float middle = std::sqrt(*smallest) * std::sqrt(*largest);  // their product may leave the range of fp32
  for (float& value : scales) value /= middle;
  return scales;
}

double plain_error(const AwqLinear& linear, MatrixView<const float> gram) {
  const std::vector<float> ones(static_cast<size_t>(linear.weight.cols), 1.0f);
  return group_error({&linear, 1}, ones, [&](MatrixView<const float> errors) { return output_error(errors, gram); });
}

std::vector<float> pivots_of_channels(std::span<const int32_t> order, std::span<const float> pivots) {
  std::vector<float> result(pivots.size());
  for (size_t p = 0; p < pivots.size(); ++p) result[static_cast<size_t>(order[p])] = pivots[p];
  return result;
}

AwqScales search_scales(std::span<const AwqLinear> linears, const AwqInput& input) {
  check_shapes(linears, input);
  const Judge judge(input);
  AwqScales best;
  double least = 0;
  for (const AwqPoint point : awq_points(input)) {
    auto scales = awq_scales_at(input, point);
    const double error = group_error(linears, scales, judge);
    if (point.scales() && !(error < least)) continue;
    best.scales = std::move(scales);
    best.point = point;
    least = error;
    if (!point.scales()) best.plain_error = error;
  }
  best.error = least;
  if (judge.by_outputs()) return best;
  const auto by_outputs = [&](MatrixView<const float> errors) { return output_error(errors, input.gram); };
  best.error = group_error(linears, best.scales, by_outputs);
  best.plain_error = best.point.scales() ? group_error(linears, awq_scales_at(input, {}), by_outputs) : best.error;
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
