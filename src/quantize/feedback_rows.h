// Rows of a weight on their way through error feedback: what every family's loop over the blocks has in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "quantize/error_factor.h"
#include "quantize/kbit_panel.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Rows of a task: enough that the factor is read seldom, and whole panels.
inline constexpr int64_t feedback_task_rows = 4 * panel_rows;

/// Some of the rows of a task.
struct RowRange {
  int64_t first = 0, count = 0;
};

/// Rows of a weight on their way through the blocks, by positions of the factor.
class FeedbackRows {
 public:
  /// `rows`: which of the weight's.
  FeedbackRows(const TensorView& weight, const ErrorFactor& factor, std::vector<int32_t> rows);

  int64_t rows() const noexcept { return static_cast<int64_t>(indices_.size()); }
  /// Of the weight.
  int64_t index(int64_t row) const noexcept { return indices_[static_cast<size_t>(row)]; }
  /// What a row is to become, and what it misses that by where it has been rounded.
  float* weights(int64_t row) noexcept { return weights_.data() + row * factor_.width(); }
  float* errors(int64_t row) noexcept { return errors_.data() + row * factor_.width(); }
  /// Codes of a row by columns, for who does not store them block by block.
  std::span<uint8_t> codes(int64_t row) noexcept {
    const auto k = static_cast<size_t>(factor_.width());
    return std::span(codes_).subspan(static_cast<size_t>(row) * k, k);
  }
  QuantizeStats& stats(int64_t row) noexcept { return stats_[static_cast<size_t>(row)]; }

  /// The weights at positions [begin, end), one block, as the errors at positions before begin move them. Rows have
  /// memory of their own, valid until the next call for them.
  MatrixView<float> targets(RowRange part, int64_t begin, int64_t end);
  /// Moves targets, whose first column is at `position`, by the errors at positions [from, to).
  void move(RowRange part, MatrixView<float> targets, int64_t from, int64_t to, int64_t position);
  /// All rows' errors at positions before begin are known: what they are worth at [begin, end) is summed at once, and
  /// targets there start from it.
  void gather(int64_t begin, int64_t end);

 private:
  const ErrorFactor& factor_;
  std::vector<int32_t> indices_;
  int64_t widest_;            // block
  int64_t gathered_ = 0;      // errors before this position are in moves_,
  int64_t gathered_end_ = 0;  // up to here
  std::vector<float> weights_, errors_, targets_, moves_;
  std::vector<uint8_t> codes_;
  std::vector<QuantizeStats> stats_;
};

/// Columns that are rounded one after the other; what they are worth to those behind them is multiplied for all at once.
inline constexpr int64_t feedback_unit = 32;

/// Through the units of the block whose `targets` begin at position `first`: round(targets of the unit, its position)
/// leaves the errors, by which those of the next are moved.
template <class Round>
void for_units(FeedbackRows& rows, RowRange part, MatrixView<float> targets, int64_t first, const Round& round) {
  for (int64_t at = 0; at < targets.cols; at += feedback_unit) {
    const int64_t cols = std::min(feedback_unit, targets.cols - at);
    const MatrixView<float> some(targets.data + at, targets.rows, cols, targets.stride);
    rows.move(part, some, first, first + at, first + at);
    round(some, first + at);
  }
}

/// The columns of a unit, each moved by the errors of those before it: round(row of the part, column of the weight,
/// target) stores a code and returns its value.
template <class Round>
void round_columns(const ErrorFactor& factor, FeedbackRows& rows, RowRange part, MatrixView<float> targets,
                   int64_t position, const Round& round) {
  const auto coupling = factor.coupling();
  for (int64_t r = 0; r < targets.rows; ++r) {
    float* const target = targets.row(r);
    const float* const weights = rows.weights(part.first + r) + position;
    float* const errors = rows.errors(part.first + r) + position;
    for (int64_t c = 0; c < targets.cols; ++c) {
      const float* effect = coupling.row(position + c) + position;
      for (int64_t earlier = 0; earlier < c; ++earlier) target[c] += effect[earlier] * errors[earlier];
      errors[c] = weights[c] - round(r, factor.order()[static_cast<size_t>(position + c)], target[c]);
    }
  }
}

/// For each row of a part whose `targets` stand at `position`, one block, the scale with the least error once the block is
/// rounded with feedback inside it; of blocks that are too wide for that, with the least error by the pivots.
std::vector<formats::StoredScale> searched_row_scales(const ErrorFactor& factor, FeedbackRows& rows, RowRange part,
                                                      MatrixView<const float> targets, int64_t position,
                                                      const KbitLevels& levels, formats::ScaleType type);

/// What a family does.
class BlockFeedback {
 public:
  virtual ~BlockFeedback() = default;

  /// Chooses scales and codes of rows in the block at positions factor.block_starts()[block], and leaves their errors.
  virtual void round(FeedbackRows& rows, RowRange part, size_t block) const = 0;
  /// Rows that are rounded together, from a multiple of it on, where each is rounded by itself along n.
  virtual int64_t task_rows() const noexcept { return feedback_task_rows; }
  /// All blocks of these rows are rounded.
  virtual void finish(FeedbackRows& rows) const;
};

/// Whether what errors of outputs cost is known, and more than a sum over rows.
bool couples_rows(const CalibratedInput& input);

/// Goes with all rows of a weight through all blocks, through `input.feedback` and, where that is given and couples rows,
/// `input.outputs`. Returns what the family counted. The result does not depend on the number of threads.
QuantizeStats run_feedback(const TensorView& weight, const CalibratedInput& input, const BlockFeedback& family);

}  // namespace w4q::quantize
