#include "quantize/sweep_blocks.h"

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::quantize {
namespace {

/// H at the columns [first, first + count).
std::vector<float> part_of(const DampedGram& gram, int64_t first, int64_t count) {
  std::vector<float> result;
  result.reserve(static_cast<size_t>(count * count));
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < count; ++j) result.push_back(gram.at(first + i, first + j));
  }
  return result;
}

void subtract(float factor, const float* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t r = 0; r < count; ++r) to[r] -= factor * from[r];
}

}  // namespace

WholeBlock::WholeBlock(const DampedGram& gram, int64_t first, int64_t count, std::string_view name)
    : first_(first), own_(part_of(gram, first, count)), factor_({own_.data(), count, count}, count, 0.0, name) {
  std::vector<float> diagonal;
  for (int64_t c = 0; c < count; ++c) diagonal.push_back(own_[static_cast<size_t>(c * count + c)]);
  mean_ = mean_diagonal(diagonal, name);
}

void WholeBlock::solve(MatrixView<float> x) const {
  const auto coupling = factor_.coupling();
  for (int64_t j = x.rows - 1; j > 0; --j) {
    for (int64_t i = 0; i < j; ++i) subtract(coupling.row(j)[i], x.row(j), x.row(i), x.cols);
  }
  for (int64_t j = 0; j < x.rows; ++j) {
    const auto pivot = static_cast<float>(mean_ * static_cast<double>(factor_.pivots()[static_cast<size_t>(j)]));
    for (int64_t r = 0; r < x.cols; ++r) x.row(j)[r] /= pivot;
    for (int64_t i = 0; i < j; ++i) subtract(coupling.row(j)[i], x.row(i), x.row(j), x.cols);
  }
}

std::array<double, widest_whole_block> WholeBlock::product(std::span<const float> d) const {
  std::array<double, widest_whole_block> sums{};
  for (size_t i = 0; i < d.size(); ++i) {
    if (d[i] == 0) continue;
    const float* row = own_.data() + i * d.size();
    const double by = d[i];
#pragma omp simd
    for (size_t j = 0; j < d.size(); ++j) sums[j] += by * static_cast<double>(row[j]);
  }
  return sums;
}

DampedGram damped_gram(MatrixView<const float> gram, const ErrorFactor& factor, int64_t width, std::string_view name,
                       std::string_view what) {
  if (gram.rows != width || gram.cols != width) {
    throw Error(ErrorCode::bad_argument, concat(printable(name), ": sweeps need ", what))
        .detail(concat("expected ", width, " × ", width, ", got ", gram.rows, " × ", gram.cols));
  }
  DampedGram result{gram};
  result.ridge = static_cast<float>(factor.damping() * mean_diagonal(result.diagonal(), name));
  return result;
}

std::vector<std::unique_ptr<const WholeBlock>> whole_blocks(const DampedGram& gram, int64_t block,
                                                            std::string_view name) {
  if (block > widest_whole_block) return {};
  const ColumnOrder order = column_order(gram.diagonal(), block);
  std::vector<std::unique_ptr<const WholeBlock>> result(order.starts.size() - 1);
  parallel_for(static_cast<int64_t>(result.size()), 1, [&](int64_t index, int64_t) {
    const auto at = static_cast<size_t>(index);
    const int64_t count = order.starts[at + 1] - order.starts[at];
    const int64_t first = order.columns[static_cast<size_t>(order.starts[at])] / block * block;
    result[at] = std::make_unique<const WholeBlock>(gram, first, count, name);
  });
  return result;
}

}  // namespace w4q::quantize
