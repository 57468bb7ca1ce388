#include "quantize/feedback_rows.h"

#include <algorithm>
#include <numeric>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"
#include "quantize/rtn.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

/// Columns that rows of a task go through before the errors of all of them are gathered.
constexpr int64_t gathered_columns = 256;
/// Columns of a task of one product.
constexpr int64_t product_columns = 128;

}  // namespace

FeedbackRows::FeedbackRows(const TensorView& weight, const ErrorFactor& factor, std::vector<int32_t> rows)
    : factor_(factor),
      indices_(std::move(rows)),
      widest_(std::min(factor.block(), factor.width())),
      weights_(indices_.size() * static_cast<size_t>(factor.width())),
      errors_(weights_.size()),
      targets_(indices_.size() * static_cast<size_t>(widest_)),
      codes_(weights_.size()),
      stats_(indices_.size()) {
  const int64_t k = factor.width();
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < this->rows(); ++r) {
    widen(row_bytes(weight, index(r)), weight.dtype, row);
    for (int64_t p = 0; p < k; ++p) weights(r)[p] = row[static_cast<size_t>(factor.order()[static_cast<size_t>(p)])];
  }
}

MatrixView<float> FeedbackRows::targets(RowRange part, int64_t begin, int64_t end) {
  const MatrixView<float> result(targets_.data() + part.first * widest_, part.count, end - begin, widest_);
  const bool gathered = begin >= gathered_ && end <= gathered_end_;
  for (int64_t r = 0; r < part.count; ++r) {
    const float* row = weights(part.first + r);
    std::copy(row + begin, row + end, result.row(r));
    if (!gathered) continue;
    const float* moves = moves_.data() + (part.first + r) * (gathered_end_ - gathered_) + (begin - gathered_);
    for (int64_t c = 0; c < result.cols; ++c) result.row(r)[c] += moves[c];
  }
  move(part, result, gathered ? gathered_ : 0, begin, begin);
  return result;
}

void FeedbackRows::move(RowRange part, MatrixView<float> targets, int64_t from, int64_t to, int64_t position) {
  if (from == to) return;
  const auto coupling = factor_.coupling();
  kernels::gemm_nt({errors(part.first) + from, part.count, to - from, factor_.width()},
                   {coupling.row(position) + from, targets.cols, to - from, coupling.stride}, targets,
                   kernels::Accumulate::yes);
}

void FeedbackRows::gather(int64_t begin, int64_t end) {
  gathered_ = begin;
  gathered_end_ = end;
  moves_.assign(static_cast<size_t>(rows() * (end - begin)), 0.0f);
  parallel_for(end - begin, product_columns, [&](int64_t from, int64_t to) {
    move({0, rows()}, {moves_.data() + from, rows(), to - from, end - begin}, 0, begin, begin + from);
  });
}

std::vector<formats::StoredScale> searched_row_scales(const ErrorFactor& factor, FeedbackRows& rows, RowRange part,
                                                      MatrixView<const float> targets, int64_t position,
                                                      const KbitLevels& levels, formats::ScaleType type) {
  const auto coupling = factor.coupling();
  const bool coupled = targets.cols <= widest_coupled;
  std::vector<float> target(static_cast<size_t>(targets.cols * panel_rows)), weights(target.size());
  std::vector<formats::StoredScale> result;
  for (int64_t first = 0; first < part.count; first += panel_rows) {
    const int64_t count = std::min<int64_t>(panel_rows, part.count - first);
    if (count < panel_rows) std::ranges::fill(target, 0.0f);
    // A row alone stands in all lanes.
    for (int64_t r = 0; r < (count == 1 ? panel_rows : count); ++r) {
      const int64_t row = first + (count == 1 ? 0 : r);
      for (int64_t c = 0; c < targets.cols; ++c) {
        target[static_cast<size_t>(c * panel_rows + r)] = targets.row(row)[c];
        weights[static_cast<size_t>(c * panel_rows + r)] = rows.weights(part.first + row)[position + c];
      }
    }
    const PanelBlock block{.target = target.data(),
                           .weights = weights.data(),
                           .importance = factor.pivots().data() + position,
                           .coupling = coupled ? coupling.row(position) + position : nullptr,
                           .coupling_stride = coupling.stride,
                           .columns = static_cast<int>(targets.cols),
                           .row_alone = count == 1};
    const PanelScales found = searched_scales(block, levels, type);
    for (size_t r = 0; r < static_cast<size_t>(count); ++r) result.push_back({found.bits[r], found.values[r], false});
  }
  return result;
}

void BlockFeedback::finish(FeedbackRows&) const {}

namespace {

/// Rows one task after the other, each row moved by what the errors of those before it are worth.
class TwoSided {
 public:
  TwoSided(const TensorView& weight, const CalibratedInput& input, const BlockFeedback& family)
      : weight_(weight),
        inputs_(*input.feedback),
        outputs_(*input.outputs),
        family_(family),
        k_(inputs_.width()),
        residuals_(static_cast<size_t>(outputs_.width() * k_)),
        shifts_(static_cast<size_t>(feedback_task_rows * k_)) {}

  /// Rows at positions [begin, end) of the factor of outputs, those before it done.
  FeedbackRows run(int64_t begin, int64_t end) {
    const auto order = outputs_.order().subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    FeedbackRows rows(weight_, inputs_, {order.begin(), order.end()});
    shift_by_earlier(begin, rows.rows());
    const auto starts = inputs_.block_starts();
    const size_t blocks = starts.size() - 1;
    for (size_t first = 0, last = 0; first < blocks; first = last) {
      while (last < blocks && (last == first || starts[last + 1] - starts[first] <= gathered_columns)) ++last;
      rows.gather(starts[first], starts[last]);
      wave(rows, begin, first, last);
    }
    family_.finish(rows);
    return rows;
  }

 private:
  float* residuals(int64_t position) { return residuals_.data() + position * k_; }
  float* shifts(int64_t row) { return shifts_.data() + row * k_; }

  void shift_by_earlier(int64_t begin, int64_t count) {
    if (begin == 0) return;
    parallel_for(k_, product_columns, [&](int64_t from, int64_t to) {
      kernels::gemm_nn({outputs_.coupling().row(begin), count, begin, outputs_.width()},
                       {residuals_.data() + from, begin, to - from, k_}, {shifts_.data() + from, count, to - from, k_});
    });
  }

  /// Row r is in block b once row r − 1 has left it and r has left block b − 1.
  void wave(FeedbackRows& rows, int64_t begin, size_t first, size_t last) {
    const auto blocks = static_cast<int64_t>(last - first);
    for (int64_t step = 0; step < rows.rows() + blocks - 1; ++step) {
      const int64_t low = std::max<int64_t>(0, step - blocks + 1), high = std::min(rows.rows() - 1, step);
      parallel_for(high - low + 1, 1, [&](int64_t i, int64_t) {
        const int64_t row = low + i;
        round(rows, begin, row, first + static_cast<size_t>(step - row));
      });
    }
  }

  void round(FeedbackRows& rows, int64_t begin, int64_t row, size_t block) {
    const int64_t from = inputs_.block_starts()[block], to = inputs_.block_starts()[block + 1];
    float* const shift = shifts(row);
    if (begin == 0) std::fill(shift + from, shift + to, 0.0f);
    const float* const coupling = outputs_.coupling().row(begin + row) + begin;
    for (int64_t earlier = 0; earlier < row; ++earlier) {
      const float* const residual = residuals(begin + earlier);
      for (int64_t p = from; p < to; ++p) shift[p] += coupling[earlier] * residual[p];
    }
    float* const weights = rows.weights(row);
    for (int64_t p = from; p < to; ++p) weights[p] += shift[p];
    family_.round(rows, {row, 1}, block);
    float* const residual = residuals(begin + row);
    for (int64_t p = from; p < to; ++p) residual[p] = rows.errors(row)[p] - shift[p];
  }

  const TensorView& weight_;
  const ErrorFactor &inputs_, &outputs_;
  const BlockFeedback& family_;
  int64_t k_;
  std::vector<float> residuals_;  // W − Ŵ, [n, k] by positions of both factors
  std::vector<float> shifts_;     // of the rows of a task
};

QuantizeStats sum_of(FeedbackRows& rows) {
  QuantizeStats sum;
  for (int64_t r = 0; r < rows.rows(); ++r) add(rows.stats(r), sum);
  return sum;
}

}  // namespace

bool couples_rows(const CalibratedInput& input) {
  for (int64_t r = 1; input.outputs != nullptr && r < input.outputs->width(); ++r) {
    const float* row = input.outputs->coupling().row(r);
    if (std::any_of(row, row + r, [](float value) { return value != 0; })) return true;
  }
  return false;
}

QuantizeStats run_feedback(const TensorView& weight, const CalibratedInput& input, const BlockFeedback& family) {
  const int64_t n = weight.shape[0];
  const bool both_sides = couples_rows(input);
  const int64_t task = both_sides ? feedback_task_rows : family.task_rows();
  std::vector<QuantizeStats> parts(static_cast<size_t>((n + task - 1) / task));
  if (both_sides) {
    TwoSided both(weight, input, family);
    for (size_t part = 0; part < parts.size(); ++part) {
      const int64_t begin = static_cast<int64_t>(part) * task;
      auto rows = both.run(begin, std::min(n, begin + task));
      parts[part] = sum_of(rows);
    }
  } else {
    parallel_for(n, task, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> indices(static_cast<size_t>(end - begin));
      std::iota(indices.begin(), indices.end(), static_cast<int32_t>(begin));
      FeedbackRows rows(weight, *input.feedback, std::move(indices));
      for (size_t block = 0; block + 1 < input.feedback->block_starts().size(); ++block) {
        check_interrupt();
        family.round(rows, {0, rows.rows()}, block);
      }
      family.finish(rows);
      parts[static_cast<size_t>(begin / task)] = sum_of(rows);
    });
  }
  QuantizeStats sum;
  for (const QuantizeStats& part : parts) add(part, sum);
  return sum;
}

}  // namespace w4q::quantize
