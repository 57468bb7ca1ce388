#include "quantize/error_factor.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/text.h"

namespace w4q::quantize {
namespace {

constexpr double largest_damping = 1e3;
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::vector<float> diagonal_of(MatrixView<const float> gram) {
  std::vector<float> result(static_cast<size_t>(gram.rows));
  for (int64_t i = 0; i < gram.rows; ++i) result[static_cast<size_t>(i)] = gram.row(i)[i];
  return result;
}

}  // namespace

ColumnOrder column_order(std::span<const float> diagonal, int64_t block) {
  const auto k = static_cast<int64_t>(diagonal.size());
  const auto loudness = [&](int32_t column) { return diagonal[static_cast<size_t>(column)]; };
  std::vector<int64_t> firsts;
  for (int64_t first = 0; first < k; first += block) firsts.push_back(first);
  std::vector<double> sums;
  for (const int64_t first : firsts) {
    double sum = 0;
    for (int64_t c = first; c < std::min(k, first + block); ++c) sum += loudness(static_cast<int32_t>(c));
    sums.push_back(sum / static_cast<double>(std::min(block, k - first)));
  }
  std::vector<size_t> blocks(firsts.size());
  std::iota(blocks.begin(), blocks.end(), size_t{0});
  std::ranges::stable_sort(blocks, [&](size_t a, size_t b) { return sums[a] > sums[b]; });
  ColumnOrder order;
  for (const size_t index : blocks) {
    order.starts.push_back(static_cast<int64_t>(order.columns.size()));
    const int64_t count = std::min(block, k - firsts[index]);
    for (int64_t c = 0; c < count; ++c) order.columns.push_back(static_cast<int32_t>(firsts[index] + c));
    std::ranges::stable_sort(order.columns.end() - count, order.columns.end(),
                             [&](int32_t a, int32_t b) { return loudness(a) > loudness(b); });
  }
  order.starts.push_back(k);
  return order;
}

double mean_diagonal(std::span<const float> diagonal, std::string_view name) {
  double sum = 0;
  for (size_t i = 0; i < diagonal.size(); ++i) {
    const double value = diagonal[i];
    if (!std::isfinite(value) || value < 0) {
      throw Error(ErrorCode::bad_file, concat(printable(name), ": the Gram matrix of its inputs is no Gram matrix"))
          .detail(concat("entry ", i, ", ", i, " is ", value));
    }
    sum += value;
  }
  const double mean = sum / static_cast<double>(diagonal.size());
  return mean > 0 ? mean : 1.0;
}

void check_damping(double damping, int64_t block, std::string_view name) {
  if (block > 0 && damping >= 0 && damping <= largest_damping) return;
  throw Error(ErrorCode::bad_argument, concat(printable(name), ": a damping of ", damping, " makes no sense"))
      .detail(concat("expected 0 to ", largest_damping));
}

double raised_damping(double damping, std::string_view name) {
  const double raised = std::max(10 * damping, 1e-6);
  if (raised <= largest_damping) return raised;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": the Gram matrix of its inputs cannot be factored"))
      .hint("calibrate again, on more text");
}

ErrorFactor::ErrorFactor(MatrixView<const float> gram, int64_t block, double damping, std::string_view name)
    : block_(block), damping_(damping) {
  check_damping(damping, block, name);
  ensure(gram.rows == gram.cols && gram.rows > 0, "ErrorFactor: not a square matrix");
  const auto diagonal = diagonal_of(gram);
  const double mean = mean_diagonal(diagonal, name);
  order_ = column_order(diagonal, block);
  coupling_.resize(static_cast<size_t>(width() * width()));
  pivots_.resize(static_cast<size_t>(width()));
  while (!factor(gram, mean)) damping_ = raised_damping(damping_, name);
}

bool ErrorFactor::factor(MatrixView<const float> gram, double mean) {
  const int64_t k = width();
  // Backwards: the lower factor of the reversed matrix is the upper factor of the matrix, reversed.
  Matrix reversed(k, k);
  for (int64_t i = 0; i < k; ++i) {
    const float* row = gram.row(order_.columns[static_cast<size_t>(k - 1 - i)]);
    for (int64_t j = 0; j < k; ++j) reversed(i, j) = row[order_.columns[static_cast<size_t>(k - 1 - j)]] / mean;
    reversed(i, i) += damping_;
  }
  const Eigen::LLT<Eigen::Ref<Matrix>, Eigen::Lower> cholesky(reversed);
  if (cholesky.info() != Eigen::Success) return false;
  for (int64_t j = 0; j < k; ++j) {
    const double root = reversed(k - 1 - j, k - 1 - j);
    if (!(root * root > least_pivot)) return false;
    pivots_[static_cast<size_t>(j)] = static_cast<float>(root * root);
    float* row = coupling_.data() + j * k;
    for (int64_t i = 0; i < j; ++i) row[i] = static_cast<float>(reversed(k - 1 - i, k - 1 - j) / root);
  }
  return true;
}

}  // namespace w4q::quantize
