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
#include "quantize/feedback_rows.h"
#include "quantize/kbit_panel.h"
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

  /// d·H for a row of the block's columns, as they stand; in fp64.
  std::array<double, widest_whole_block> product(std::span<const float> d) const {
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
  /// d·H·dᵀ.
  double curvature(std::span<const float> d) const {
    const auto sums = product(d);
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

/// What rows of a block, [rows, columns], might become: codes in the order of the block's factor.
struct Proposal {
  Proposal(int64_t rows, int64_t columns)
      : scales(static_cast<size_t>(rows)), codes(static_cast<size_t>(rows * columns)) {}

  std::vector<BlockScale> scales;
  std::vector<uint8_t> codes;
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

  int64_t first() const noexcept { return first_; }
  int64_t rows() const noexcept { return rows_; }

  void block(const WholeBlock& block) {
    const MatrixView<float> pulls = this->pulls(block.first(), block.columns());
    const auto found = propose(block, 0, pulls);
    for (int64_t r = 0; r < rows_; ++r) take(r, r, block, pulls.row(r), found);
  }

  /// The codes of these columns, which are [first, first + their count) in some order, one after the other.
  void codes(std::span<const int32_t> columns, int64_t first) {
    const MatrixView<float> pulls = this->pulls(first, static_cast<int64_t>(columns.size()));
    for (int64_t r = 0; r < rows_; ++r) codes_of_row(r, columns, first, pulls.row(r));
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

  /// The blocks of the rows from `row` on, one for each of `pulls`, rounded towards where the error would be least, all
  /// else kept: Ŵ + pull·H⁻¹.
  Proposal propose(const WholeBlock& block, int64_t row, MatrixView<const float> pulls) const {
    const int64_t count = block.columns();
    std::vector<float> moves(static_cast<size_t>(pulls.rows * count)), targets(moves.size());
    const MatrixView<float> by_column(moves.data(), count, pulls.rows);
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t r = 0; r < pulls.rows; ++r) by_column.row(p)[r] = pulls.row(r)[block.column(p) - block.first()];
    }
    block.solve(by_column);
    for (int64_t r = 0; r < pulls.rows; ++r) {
      for (int64_t p = 0; p < count; ++p) {
        targets[static_cast<size_t>(r * count + p)] = values_[index(row + r, block.column(p))] + by_column.row(p)[r];
      }
    }
    Proposal result(pulls.rows, count);
    rounding_.round(block.factor(), {targets.data(), pulls.rows, count}, result.scales, result.codes);
    return result;
  }

  /// Takes row `of` of a proposal for the block of `row`, if the error falls; returns by what its values moved, as columns
  /// stand.
  std::array<float, widest_whole_block> take(int64_t row, int64_t of, const WholeBlock& block, const float* pulls,
                                             const Proposal& found) {
    const auto count = static_cast<size_t>(block.columns());
    const std::span codes = std::span(found.codes).subspan(static_cast<size_t>(of) * count, count);
    const BlockScale& chosen = found.scales[static_cast<size_t>(of)];
    std::array<float, widest_whole_block> moves{};
    for (size_t p = 0; p < count; ++p) {
      const int64_t column = block.column(static_cast<int64_t>(p));
      moves[static_cast<size_t>(column - block.first())] =
          rounding_.value(codes[p], chosen) - values_[index(row, column)];
    }
    double gain = 0;
    for (size_t c = 0; c < count; ++c) gain += 2.0 * static_cast<double>(pulls[c]) * static_cast<double>(moves[c]);
    if (!(block.curvature(std::span(moves).first(count)) < certain * gain)) return {};
    for (size_t p = 0; p < count; ++p) {
      place(row, block.column(static_cast<int64_t>(p)), codes[p], rounding_.value(codes[p], chosen));
    }
    scale(row, block.first()) = chosen;
    rounding_.write_scale(first_ + row, block.first() / rounding_.block(), chosen);
    return moves;
  }

  /// One row's codes of these columns; `pulls`, of the columns from `first` on, follow.
  void codes_of_row(int64_t row, std::span<const int32_t> columns, int64_t first, float* pulls) {
    for (const int32_t column : columns) code(row, column, first, {pulls, columns.size()});
  }
  const float* values(int64_t row, int64_t column) const { return values_.data() + index(row, column); }

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

  void place(int64_t row, int64_t column, uint8_t code, float value) {
    const size_t at = index(row, column);
    codes_[at] = code;
    values_[at] = value;
    residuals_[at] = weights_[at] - value;
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

/// The matrix that `factor` is of. `what`: "the Gram matrix of its inputs".
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

/// All rows at once, block by block: what a row's block pulls at is Σ_p H_O[r, p] / H_O[r, r] times the rows' own pulls.
class CoupledRows {
 public:
  CoupledRows(const TensorView& weight, const DampedGram& gram, const DampedGram& outputs, BlockRounding& rounding)
      : gram_(gram),
        outputs_(outputs),
        n_(weight.shape[0]),
        tasks_(static_cast<size_t>((n_ + task_rows - 1) / task_rows)) {
    parallel_for(n_, task_rows, [&](int64_t begin, int64_t) {
      tasks_[static_cast<size_t>(begin / task_rows)] = std::make_unique<SweepRows>(weight, gram, rounding, begin);
    });
  }

  /// Rows of a task are rounded as if none of them moved, and taken one after the other where the error falls after
  /// those before have.
  void block(const WholeBlock& block) {
    const int64_t count = block.columns();
    find_own(block.first(), count);
    for (const auto& task : tasks_) {
      const MatrixView<float> pulls = mixed(*task, count);
      const int64_t parts = (task->rows() + panel_rows - 1) / panel_rows;
      std::vector<std::optional<Proposal>> found(static_cast<size_t>(parts));
      parallel_for(parts, 1, [&](int64_t part, int64_t) {
        const int64_t row = part * panel_rows;
        found[static_cast<size_t>(part)] = task->propose(
            block, row, {pulls.row(row), std::min<int64_t>(panel_rows, task->rows() - row), count, pulls.stride});
      });
      for (int64_t r = 0; r < task->rows(); ++r) {
        const auto moves =
            task->take(r, r % panel_rows, block, pulls.row(r), *found[static_cast<size_t>(r / panel_rows)]);
        const std::span moved = std::span(moves).first(static_cast<size_t>(count));
        if (std::ranges::all_of(moved, [](float move) { return move == 0; })) continue;
        const auto pulled = block.product(moved);
        follow(*task, r, {pulled.data(), moved.size()}, pulls);
      }
    }
  }

  void codes(std::span<const int32_t> columns, int64_t first) {
    const auto count = static_cast<int64_t>(columns.size());
    find_own(first, count);
    std::vector<float> before(columns.size());
    std::vector<double> pulled(columns.size());
    for (const auto& task : tasks_) {
      const MatrixView<float> pulls = mixed(*task, count);
      for (int64_t r = 0; r < task->rows(); ++r) {
        std::copy_n(task->values(r, first), count, before.begin());
        std::vector<float> own(pulls.row(r), pulls.row(r) + count);
        task->codes_of_row(r, columns, first, own.data());
        std::ranges::fill(pulled, 0.0);
        bool moved = false;
        for (int64_t c = 0; c < count; ++c) {
          const double move = double{task->values(r, first)[c]} - double{before[static_cast<size_t>(c)]};
          if (move == 0) continue;
          moved = true;
          for (int64_t to = 0; to < count; ++to) {
            pulled[static_cast<size_t>(to)] += move * double{gram_.at(first + c, first + to)};
          }
        }
        if (moved) follow(*task, r, pulled, pulls);
      }
    }
  }

  void store() {
    for (const auto& task : tasks_) task->store();
  }

 private:
  /// (W − Ŵ)·H of all rows at these columns.
  void find_own(int64_t first, int64_t count) {
    own_.resize(static_cast<size_t>(n_ * count));
    parallel_for(static_cast<int64_t>(tasks_.size()), 1, [&](int64_t index, int64_t) {
      SweepRows& task = *tasks_[static_cast<size_t>(index)];
      const auto pulls = task.pulls(first, count);
      std::copy_n(pulls.data, pulls.rows * count, own_.data() + task.first() * count);
    });
  }

  MatrixView<float> mixed(const SweepRows& task, int64_t count) {
    mixed_.resize(static_cast<size_t>(task.rows() * count));
    const MatrixView<float> result(mixed_.data(), task.rows(), count);
    parallel_for(task.rows(), panel_rows, [&](int64_t begin, int64_t end) {
      kernels::gemm_nn({outputs_.gram.row(task.first() + begin), end - begin, n_, outputs_.gram.stride},
                       {own_.data(), n_, count}, {result.row(begin), end - begin, count});
      for (int64_t r = begin; r < end; ++r) {
        const int64_t row = task.first() + r;
        const float diagonal = outputs_.at(row, row);
        const float* own = own_.data() + row * count;
        for (int64_t c = 0; c < count; ++c) {
          result.row(r)[c] = diagonal > 0 ? (result.row(r)[c] + outputs_.ridge * own[c]) / diagonal : own[c];
        }
      }
    });
    return result;
  }

  /// What row r of a task has moved by, times H, leaves its own pull and those of the rows behind it.
  void follow(const SweepRows& task, int64_t r, std::span<const double> pulled, MatrixView<float> pulls) {
    float* const own = own_.data() + (task.first() + r) * pulls.cols;
    for (size_t c = 0; c < pulled.size(); ++c) own[c] -= static_cast<float>(pulled[c]);
    for (int64_t later = r + 1; later < task.rows(); ++later) {
      const int64_t row = task.first() + later;
      const double diagonal = outputs_.at(row, row);
      const double share = diagonal > 0 ? double{outputs_.gram.row(row)[task.first() + r]} / diagonal : 0.0;
      for (size_t c = 0; c < pulled.size(); ++c) pulls.row(later)[c] -= static_cast<float>(share * pulled[c]);
    }
  }

  const DampedGram &gram_, &outputs_;
  int64_t n_;
  std::vector<std::unique_ptr<SweepRows>> tasks_;
  std::vector<float> own_, mixed_;
};

template <class Rows>
void sweep_codes(const ColumnOrder& order, Rows& rows) {
  for (size_t u = 0; u + 1 < order.starts.size(); ++u) {
    const auto begin = static_cast<size_t>(order.starts[u]), end = static_cast<size_t>(order.starts[u + 1]);
    rows.codes(std::span(order.columns).subspan(begin, end - begin), order.columns[begin] / code_unit * code_unit);
  }
}

template <class Rows>
void sweep_rows(const std::vector<std::unique_ptr<const WholeBlock>>& blocks, const ColumnOrder& units, Rows& rows) {
  for (int s = 0; s < block_sweeps; ++s) {
    for (const auto& block : blocks) rows.block(*block);
    if (blocks.empty()) sweep_codes(units, rows);
  }
  for (int s = 0; s < code_sweeps; ++s) sweep_codes(units, rows);
  rows.store();
}

}  // namespace

void sweep(const TensorView& weight, const QuantizeOptions& options, formats::PackedWeight& packed) {
  ensure(options.feeds_back(), "sweep: no feedback");
  const CalibratedInput& input = *options.input;
  const DampedGram gram =
      damped_gram(input.gram, *input.feedback, packed.k, weight.name, "the Gram matrix of its inputs");
  const auto rounding = block_rounding(packed, options);
  const auto blocks = whole_blocks(gram, rounding->block(), weight.name);
  const ColumnOrder units = column_order(gram.diagonal(), code_unit);
  if (couples_rows(input)) {
    const DampedGram outputs =
        damped_gram(input.output_gram, *input.outputs, packed.n, weight.name, "what errors of its outputs cost");
    CoupledRows rows(weight, gram, outputs, *rounding);
    return sweep_rows(blocks, units, rows);
  }
  parallel_for(packed.n, task_rows, [&](int64_t begin, int64_t) {
    SweepRows rows(weight, gram, *rounding, begin);
    sweep_rows(blocks, units, rows);
  });
}

}  // namespace w4q::quantize
