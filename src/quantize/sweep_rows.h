// Rows of a weight on their way through sweeps.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/convert.h"
#include "core/views.h"
#include "kernels/linear/gemm.h"
#include "quantize/block_rounding.h"
#include "quantize/source_matrix.h"
#include "quantize/sweep_blocks.h"

namespace w4q::quantize {

/// Rows of a task: enough that the Gram matrix is read seldom.
inline constexpr int64_t sweep_task_rows = 64;

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
        rows_(std::min(sweep_task_rows, weight.shape[0] - first)),
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
    if (!(block.curvature(std::span(moves).first(count)) < certain_share * gain)) return {};
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
    if (!(static_cast<double>(curvature) * step * step < certain_share * 2 * static_cast<double>(pull) * step)) return;
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

}  // namespace w4q::quantize
