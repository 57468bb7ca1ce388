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
/// A pivot this small beside the diagonal has no digits left that the fp32 Gram matrix vouches for.
constexpr double least_pivot = 1e-7;

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

double mean_diagonal(MatrixView<const float> gram, std::string_view name) {
  double sum = 0;
  for (int64_t i = 0; i < gram.rows; ++i) {
    const double value = gram.row(i)[i];
    if (!std::isfinite(value) || value < 0) {
      throw Error(ErrorCode::bad_file, concat(printable(name), ": the Gram matrix of its inputs is no Gram matrix"))
          .detail(concat("entry ", i, ", ", i, " is ", value));
    }
    sum += value;
  }
  const double mean = sum / static_cast<double>(gram.rows);
  return mean > 0 ? mean : 1.0;
}

}  // namespace

ErrorFactor::ErrorFactor(MatrixView<const float> gram, int64_t block, double damping, std::string_view name)
    : block_(block), damping_(damping) {
  if (block <= 0 || !(damping >= 0 && damping <= largest_damping)) {
    throw Error(ErrorCode::bad_argument, concat(printable(name), ": a damping of ", damping, " makes no sense"))
        .detail(concat("expected 0 to ", largest_damping));
  }
  ensure(gram.rows == gram.cols && gram.rows > 0, "ErrorFactor: not a square matrix");
  const double mean = mean_diagonal(gram, name);
  choose_order(gram);
  coupling_.resize(static_cast<size_t>(width() * width()));
  pivots_.resize(static_cast<size_t>(width()));
  while (!factor(gram, mean)) {
    damping_ = std::max(10 * damping_, 1e-6);
    if (damping_ <= largest_damping) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": the Gram matrix of its inputs cannot be factored"))
        .hint("calibrate again, on more text");
  }
}

void ErrorFactor::choose_order(MatrixView<const float> gram) {
  const int64_t k = gram.rows;
  const auto loudness = [&](int32_t column) { return gram.row(column)[column]; };
  std::vector<int64_t> firsts;
  for (int64_t first = 0; first < k; first += block_) firsts.push_back(first);
  std::vector<double> sums;
  for (const int64_t first : firsts) {
    double sum = 0;
    for (int64_t c = first; c < std::min(k, first + block_); ++c) sum += loudness(static_cast<int32_t>(c));
    sums.push_back(sum / static_cast<double>(std::min(block_, k - first)));
  }
  std::vector<size_t> blocks(firsts.size());
  std::iota(blocks.begin(), blocks.end(), size_t{0});
  std::ranges::stable_sort(blocks, [&](size_t a, size_t b) { return sums[a] > sums[b]; });
  for (const size_t index : blocks) {
    starts_.push_back(static_cast<int64_t>(order_.size()));
    const int64_t count = std::min(block_, k - firsts[index]);
    for (int64_t c = 0; c < count; ++c) order_.push_back(static_cast<int32_t>(firsts[index] + c));
    std::ranges::stable_sort(order_.end() - count, order_.end(),
                             [&](int32_t a, int32_t b) { return loudness(a) > loudness(b); });
  }
  starts_.push_back(k);
}

bool ErrorFactor::factor(MatrixView<const float> gram, double mean) {
  const int64_t k = width();
  // Backwards: the lower factor of the reversed matrix is the upper factor of the matrix, reversed.
  Matrix reversed(k, k);
  for (int64_t i = 0; i < k; ++i) {
    const float* row = gram.row(order_[static_cast<size_t>(k - 1 - i)]);
    for (int64_t j = 0; j < k; ++j) reversed(i, j) = row[order_[static_cast<size_t>(k - 1 - j)]] / mean;
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
