#include "quantize/sweeps.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"
#include "quantize/feedback_rows.h"
#include "quantize/kbit_panel.h"
#include "quantize/sweep_rows.h"

namespace w4q::quantize {
namespace {

/// All rows at once, block by block: what a row's block pulls at is Σ_p H_O[r, p] / H_O[r, r] times the rows' own pulls.
class CoupledRows {
 public:
  CoupledRows(const TensorView& weight, const DampedGram& gram, const DampedGram& outputs, BlockRounding& rounding)
      : gram_(gram),
        outputs_(outputs),
        n_(weight.shape[0]),
        tasks_(static_cast<size_t>((n_ + sweep_task_rows - 1) / sweep_task_rows)) {
    parallel_for(n_, sweep_task_rows, [&](int64_t begin, int64_t) {
      tasks_[static_cast<size_t>(begin / sweep_task_rows)] = std::make_unique<SweepRows>(weight, gram, rounding, begin);
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
    rows.codes(std::span(order.columns).subspan(begin, end - begin),
               order.columns[begin] / sweep_code_unit * sweep_code_unit);
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
  const int64_t block = rounding->keeps_scales() ? widest_whole_block + 1 : rounding->block();
  const auto blocks = whole_blocks(gram, block, weight.name);
  const ColumnOrder units = column_order(gram.diagonal(), sweep_code_unit);
  if (couples_rows(input)) {
    const DampedGram outputs =
        damped_gram(input.output_gram, *input.outputs, packed.n, weight.name, "what errors of its outputs cost");
    CoupledRows rows(weight, gram, outputs, *rounding);
    return sweep_rows(blocks, units, rows);
  }
  parallel_for(packed.n, sweep_task_rows, [&](int64_t begin, int64_t) {
    SweepRows rows(weight, gram, *rounding, begin);
    sweep_rows(blocks, units, rows);
  });
}

}  // namespace w4q::quantize
