// Rows of a weight on their way through error feedback: what every family's loop over the blocks has in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/views.h"
#include "kernels/linear/gemm.h"
#include "quantize/error_factor.h"
#include "quantize/kbit_panel.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {

/// Rows of a task: enough that the factor is read seldom, and whole panels.
inline constexpr int64_t feedback_task_rows = 4 * panel_rows;

/// Rows of a weight on their way through the blocks, by positions of the factor.
class FeedbackRows {
 public:
  FeedbackRows(const TensorView& weight, const ErrorFactor& factor, int64_t first)
      : factor_(factor),
        first_(first),
        rows_(std::min(feedback_task_rows, weight.shape[0] - first)),
        weights_(static_cast<size_t>(rows_ * factor.width())),
        errors_(weights_.size()),
        targets_(static_cast<size_t>(rows_ * std::min(factor.block(), factor.width()))) {
    const int64_t k = factor.width();
    std::vector<float> row(static_cast<size_t>(k));
    for (int64_t r = 0; r < rows_; ++r) {
      widen(row_bytes(weight, first + r), weight.dtype, row);
      float* out = weights_.data() + r * k;
      for (int64_t p = 0; p < k; ++p) out[p] = row[static_cast<size_t>(factor.order()[static_cast<size_t>(p)])];
    }
  }

  int64_t first() const noexcept { return first_; }
  int64_t rows() const noexcept { return rows_; }
  const float* weights(int64_t row) const noexcept { return weights_.data() + row * factor_.width(); }
  float* errors(int64_t row) noexcept { return errors_.data() + row * factor_.width(); }

  /// The weights at positions [begin, end) as the errors at positions before begin move them.
  MatrixView<float> targets(int64_t begin, int64_t end) {
    const MatrixView<float> result(targets_.data(), rows_, end - begin);
    for (int64_t r = 0; r < rows_; ++r) std::copy(weights(r) + begin, weights(r) + end, result.row(r));
    move(result, 0, begin, begin);
    return result;
  }

  /// Moves targets, whose first column is at `position`, by the errors at positions [from, to).
  void move(MatrixView<float> targets, int64_t from, int64_t to, int64_t position) {
    if (from == to) return;
    const auto coupling = factor_.coupling();
    kernels::gemm_nt({errors_.data() + from, rows_, to - from, factor_.width()},
                     {coupling.row(position) + from, targets.cols, to - from, coupling.stride}, targets,
                     kernels::Accumulate::yes);
  }

 private:
  const ErrorFactor& factor_;
  int64_t first_, rows_;
  std::vector<float> weights_, errors_, targets_;
};

/// Calls body(rows, task) for tasks of rows in parallel.
template <class Body>
void for_feedback_tasks(const TensorView& weight, const ErrorFactor& factor, const Body& body) {
  parallel_for(weight.shape[0], feedback_task_rows, [&](int64_t begin, int64_t) {
    FeedbackRows rows(weight, factor, begin);
    body(rows, static_cast<size_t>(begin / feedback_task_rows));
  });
}

}  // namespace w4q::quantize
