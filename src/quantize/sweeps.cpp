#include "quantize/sweeps.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/linear/gemm.h"
#include "quantize/block_rounding.h"
#include "quantize/error_factor.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

constexpr int block_sweeps = 2, code_sweeps = 1;
/// Rows of a task: enough that the Gram matrix is read seldom.
constexpr int64_t task_rows = 64;
/// Columns whose codes are decided with one product behind them.
constexpr int64_t code_unit = 32;
/// Of what a change gains to first order, the share that its second order may cost: products in fp32 vouch for no more.
constexpr double certain = 1 - 1e-4;

/// H: the Gram matrix, and what damping adds to its diagonal.
struct DampedGram {
  MatrixView<const float> gram;
  float ridge = 0;

  float at(int64_t row, int64_t column) const { return gram.row(row)[column] + (row == column ? ridge : 0.0f); }
  std::vector<float> diagonal() const {
    std::vector<float> result;
    for (int64_t c = 0; c < gram.rows; ++c) result.push_back(gram.row(c)[c]);
    return result;
  }
};

/// H at the columns [first, first + count).
std::vector<float> part_of(const DampedGram& gram, int64_t first, int64_t count) {
  std::vector<float> result;
  result.reserve(static_cast<size_t>(count * count));
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < count; ++j) result.push_back(gram.at(first + i, first + j));
  }
  return result;
}

/// A block that is rounded as a whole: H at its columns, and its factor.
class WholeBlock {
 public:
  WholeBlock(const DampedGram& gram, int64_t first, int64_t count, std::string_view name)
      : first_(first), own_(part_of(gram, first, count)), factor_({own_.data(), count, count}, count, 0.0, name) {
    std::vector<float> diagonal;
    for (int64_t c = 0; c < count; ++c) diagonal.push_back(own_[static_cast<size_t>(c * count + c)]);
    mean_ = mean_diagonal(diagonal, name);
  }

  int64_t first() const noexcept { return first_; }
  int64_t columns() const noexcept { return factor_.width(); }
  /// In the order of the factor.
  int64_t column(int64_t position) const { return first_ + factor_.order()[static_cast<size_t>(position)]; }
  const ErrorFactor& factor() const noexcept { return factor_; }

  /// x·H⁻¹ in place, columns in the order of the factor; x stands transposed, [columns, rows].
  void solve(MatrixView<float> x) const {
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

  /// d·H·dᵀ for a row of the block's columns, as they stand; in fp64.
  double curvature(std::span<const float> d) const {
    std::array<double, widest_whole_block> sums{};
    for (size_t i = 0; i < d.size(); ++i) {
      if (d[i] == 0) continue;
      const float* row = own_.data() + i * d.size();
      const double by = d[i];
#pragma omp simd
      for (size_t j = 0; j < d.size(); ++j) sums[j] += by * static_cast<double>(row[j]);
    }
    return std::inner_product(d.begin(), d.end(), sums.begin(), 0.0);
  }

 private:
  static void subtract(float factor, const float* from, float* to, int64_t count) {
#pragma omp simd
    for (int64_t r = 0; r < count; ++r) to[r] -= factor * from[r];
  }

  int64_t first_;
  std::vector<float> own_;  // as its columns stand
  ErrorFactor factor_;
  double mean_ = 1;  // of the diagonal, which the factor leaves out
};

/// The rows of a task. Their pull is (W − Ŵ)·H: moving a weight up by d lessens the error by 2·pull·d − H_jj·d².
class SweepRows {
 public:
  SweepRows(const TensorView& weight, const DampedGram& gram, BlockRounding& rounding, int64_t first)
      : gram_(gram),
        rounding_(rounding),
        first_(first),
        rows_(std::min(task_rows, weight.shape[0] - first)),
        k_(weight.shape[1]),
        blocks_((k_ + rounding.block() - 1) / rounding.block()),
        weights_(static_cast<size_t>(rows_ * k_)),
        values_(weights_.size()),
        residuals_(weights_.size()),
        codes_(weights_.size()),
        scales_(static_cast<size_t>(rows_ * blocks_)) {
    for (int64_t r = 0; r < rows_; ++r) {
      const auto begin = static_cast<size_t>(r * k_), size = static_cast<size_t>(k_);
      widen(row_bytes(weight, first + r), weight.dtype, std::span(weights_).subspan(begin, size));
      rounding.read(first + r, std::span(codes_).subspan(begin, size), {&scale(r, 0), static_cast<size_t>(blocks_)});
      for (int64_t c = 0; c < k_; ++c) {
        const size_t at = begin + static_cast<size_t>(c);
        values_[at] = rounding.value(codes_[at], scale(r, c));
        residuals_[at] = weights_[at] - values_[at];
      }
    }
  }

  /// Every row's block is rounded towards where the error would be least, all else kept: Ŵ + pull·H⁻¹.
  void block(const WholeBlock& block) {
    const int64_t count = block.columns();
    const MatrixView<const float> pulls = this->pulls(block.first(), count);
    std::vector<float> moves(static_cast<size_t>(rows_ * count)), targets(moves.size());
    const MatrixView<float> by_column(moves.data(), count, rows_);
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t r = 0; r < rows_; ++r) by_column.row(p)[r] = pulls.row(r)[block.column(p) - block.first()];
    }
    block.solve(by_column);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t p = 0; p < count; ++p) {
        targets[static_cast<size_t>(r * count + p)] = values_[index(r, block.column(p))] + by_column.row(p)[r];
      }
    }
    std::vector<BlockScale> scales(static_cast<size_t>(rows_));
    std::vector<uint8_t> codes(targets.size());
    rounding_.round(block.factor(), {targets.data(), rows_, count}, scales, codes);
    for (int64_t r = 0; r < rows_; ++r) {
      take(r, block, {pulls.row(r), static_cast<size_t>(count)}, scales[static_cast<size_t>(r)],
           {codes.data() + r * count, static_cast<size_t>(count)});
    }
  }

  /// The codes of these columns, which are [first, first + their count) in some order, one after the other.
  void codes(std::span<const int32_t> columns, int64_t first) {
    const MatrixView<float> pulls = this->pulls(first, static_cast<int64_t>(columns.size()));
    for (int64_t r = 0; r < rows_; ++r) {
      for (const int32_t column : columns) code(r, column, first, {pulls.row(r), columns.size()});
    }
  }

  void store() {
    for (int64_t r = 0; r < rows_; ++r) {
      rounding_.write_codes(first_ + r,
                            std::span(codes_).subspan(static_cast<size_t>(r * k_), static_cast<size_t>(k_)));
    }
  }

 private:
  size_t index(int64_t row, int64_t column) const { return static_cast<size_t>(row * k_ + column); }
  BlockScale& scale(int64_t row, int64_t column) {
    return scales_[static_cast<size_t>(row * blocks_ + column / rounding_.block())];
  }

  /// Of the columns [first, first + count); valid until the next call.
  MatrixView<float> pulls(int64_t first, int64_t count) {
    pulls_.resize(static_cast<size_t>(rows_ * count));
    const MatrixView<float> result(pulls_.data(), rows_, count);
    kernels::gemm_nt({residuals_.data(), rows_, k_}, {gram_.gram.row(first), count, k_, gram_.gram.stride}, result);
    for (int64_t r = 0; r < rows_; ++r) {
      const float* residuals = residuals_.data() + index(r, first);
      for (int64_t c = 0; c < count; ++c) result.row(r)[c] += gram_.ridge * residuals[c];
    }
    return result;
  }

  void place(int64_t row, int64_t column, uint8_t code, float value) {
    const size_t at = index(row, column);
    codes_[at] = code;
    values_[at] = value;
    residuals_[at] = weights_[at] - value;
  }

  /// Takes a block as it was rounded, if the error falls.
  void take(int64_t row, const WholeBlock& block, std::span<const float> pulls, const BlockScale& chosen,
            std::span<const uint8_t> codes) {
    std::array<float, widest_whole_block> moves{};
    for (size_t p = 0; p < codes.size(); ++p) {
      const int64_t column = block.column(static_cast<int64_t>(p));
      moves[static_cast<size_t>(column - block.first())] =
          rounding_.value(codes[p], chosen) - values_[index(row, column)];
    }
    double gain = 0;
    for (size_t c = 0; c < pulls.size(); ++c)
      gain += 2.0 * static_cast<double>(pulls[c]) * static_cast<double>(moves[c]);
    if (!(block.curvature(std::span(moves).first(pulls.size())) < certain * gain)) return;
    for (size_t p = 0; p < codes.size(); ++p) {
      place(row, block.column(static_cast<int64_t>(p)), codes[p], rounding_.value(codes[p], chosen));
    }
    scale(row, block.first()) = chosen;
    rounding_.write_scale(first_ + row, block.first() / rounding_.block(), chosen);
  }

  /// Takes the code nearest to where the error would be least, if it falls; `pulls` follow.
  void code(int64_t row, int64_t column, int64_t first, std::span<float> pulls) {
    float& pull = pulls[static_cast<size_t>(column - first)];
    const float curvature = gram_.at(column, column), from = values_[index(row, column)];
    if (!(curvature > 0)) return;
    const BlockScale& own = scale(row, column);
    const uint8_t found = rounding_.nearest(from + pull / curvature, own);
    const float value = rounding_.value(found, own), move = value - from;
    const double step = move;
    if (!(static_cast<double>(curvature) * step * step < certain * 2 * static_cast<double>(pull) * step)) return;
    place(row, column, found, value);
    const float* coupled = gram_.gram.row(column) + first;
    for (size_t c = 0; c < pulls.size(); ++c) pulls[c] -= move * coupled[c];
    pull -= move * gram_.ridge;
  }

  const DampedGram& gram_;
  BlockRounding& rounding_;
  int64_t first_, rows_, k_, blocks_;
  std::vector<float> weights_, values_, residuals_, pulls_;
  std::vector<uint8_t> codes_;
  std::vector<BlockScale> scales_;
};

/// H of the input's factor.
DampedGram damped_gram(const QuantizeOptions& options, int64_t k, std::string_view name) {
  const CalibratedInput& input = *options.input;
  if (input.gram.rows != k || input.gram.cols != k) {
    throw Error(ErrorCode::bad_argument, concat(printable(name), ": sweeps need the Gram matrix of its inputs"))
        .detail(concat("expected ", k, " × ", k, ", got ", input.gram.rows, " × ", input.gram.cols));
  }
  DampedGram result{input.gram};
  result.ridge = static_cast<float>(input.feedback->damping() * mean_diagonal(result.diagonal(), name));
  return result;
}

/// In the order of the sweeps; none where blocks are too wide.
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

void sweep_codes(const ColumnOrder& order, SweepRows& rows) {
  for (size_t u = 0; u + 1 < order.starts.size(); ++u) {
    const auto begin = static_cast<size_t>(order.starts[u]), end = static_cast<size_t>(order.starts[u + 1]);
    rows.codes(std::span(order.columns).subspan(begin, end - begin), order.columns[begin] / code_unit * code_unit);
  }
}

}  // namespace

void sweep(const TensorView& weight, const QuantizeOptions& options, formats::PackedWeight& packed) {
  ensure(options.feeds_back(), "sweep: no feedback");
  const DampedGram gram = damped_gram(options, packed.k, weight.name);
  const auto rounding = block_rounding(packed, options);
  const auto blocks = whole_blocks(gram, rounding->block(), weight.name);
  const ColumnOrder units = column_order(gram.diagonal(), code_unit);
  parallel_for(packed.n, task_rows, [&](int64_t begin, int64_t) {
    SweepRows rows(weight, gram, *rounding, begin);
    for (int s = 0; s < block_sweeps; ++s) {
      for (const auto& block : blocks) rows.block(*block);
      if (blocks.empty()) sweep_codes(units, rows);
    }
    for (int s = 0; s < code_sweeps; ++s) sweep_codes(units, rows);
    rows.store();
  });
}

}  // namespace w4q::quantize
