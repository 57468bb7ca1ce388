#include "quantize/feedback_trellis.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "formats/trellis.h"
#include "kernels/linear/gemm.h"
#include "quantize/feedback_rows.h"
#include "quantize/sweep_trellis.h"
#include "quantize/trellis.h"
#include "quantize/trellis_simd.h"
#include "quantize/trellis_strip.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::Scheme;
using formats::trellis_rows;

/// A strip of rows in a block of columns, column after column.
using StripBlock = std::array<StripValues, trellis_feedback_block>;

class TrellisFeedback final : public BlockFeedback {
 public:
  TrellisFeedback(const ErrorFactor& factor, PackedWeight& packed)
      : factor_(factor), packed_(packed), levels_(trellis_fast_levels(packed.scheme.bits, packed.scheme.window)) {}

  int64_t task_rows() const noexcept override { return trellis_rows; }

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    round(rows, part, block, RingStrip(packed_, rows.index(part.first) / trellis_rows));
  }

  void round(FeedbackRows& rows, RowRange part, size_t block, const RingStrip& strip) const {
    const int64_t begin = factor_.block_starts()[block], width = factor_.block_starts()[block + 1] - begin;
    const MatrixView<const float> targets = rows.targets(part, begin, begin + width);
    auto moved = std::make_unique<StripBlock>();
    for (int64_t r = 0; r < part.count; ++r) {
      for (int64_t c = 0; c < width; ++c) (*moved)[static_cast<size_t>(c)][static_cast<size_t>(r)] = targets.row(r)[c];
    }
    auto search = trellis_search(packed_.scheme, levels_);
    for (int64_t c = 0; c < width; ++c) {
      const auto ring = strip.nearest(search, (*moved)[static_cast<size_t>(c)]);
      strip.store(ring, factor_.order()[static_cast<size_t>(begin + c)], packed_);
      StripValues errors{};
      for (int64_t r = 0; r < part.count; ++r) {
        float& error = rows.errors(part.first + r)[begin + c];
        error = rows.weights(part.first + r)[begin + c] - ring.values[static_cast<size_t>(r)];
        errors[static_cast<size_t>(r)] = error;
      }
      for (int64_t later = c + 1; later < width; ++later) {
        const float effect = factor_.coupling().row(begin + later)[begin + c];
        auto& target = (*moved)[static_cast<size_t>(later)];
        for (size_t r = 0; r < trellis_rows; ++r) target[r] += effect * errors[r];
      }
    }
  }

 private:
  const ErrorFactor& factor_;
  PackedWeight& packed_;
  std::vector<float> levels_;
};

/// Strips one after the other in the order of the factor of outputs, each moved by what the errors of those before it are
/// worth. With H_O = M·D·Mᵀ cut into strips, strip b costs B = M_bb·D_b·M_bbᵀ once those behind it make up for it, and is
/// moved by M_bb⁻ᵀ·Σ_a M_abᵀ·E_a.
class TwoSidedStrips {
 public:
  TwoSidedStrips(const TensorView& weight, const CalibratedInput& input, const TrellisFeedback& family,
                 const PackedWeight& packed)
      : inputs_(*input.feedback),
        outputs_(*input.outputs),
        family_(family),
        k_(inputs_.width()),
        residuals_(static_cast<size_t>(outputs_.width() * k_)) {
    const auto starts = outputs_.block_starts();
    for (size_t s = 0; s + 1 < starts.size(); ++s) strips_.push_back(part(weight, packed, starts[s], starts[s + 1]));
  }

  /// Strip s is in block b once strip s − 1 has left it and s has left block b − 1.
  void run() {
    const auto strips = static_cast<int64_t>(strips_.size());
    const int64_t blocks = static_cast<int64_t>(inputs_.block_starts().size()) - 1;
    for (int64_t step = 0; step < strips + blocks - 1; ++step) {
      check_interrupt();
      const int64_t low = std::max<int64_t>(0, step - blocks + 1), high = std::min(strips - 1, step);
      parallel_for(high - low + 1, 1, [&](int64_t i, int64_t) {
        round(strips_[static_cast<size_t>(low + i)], static_cast<size_t>(step - low - i));
      });
    }
  }

 private:
  struct Part {
    int64_t begin;  ///< position
    RingStrip strip;
    FeedbackRows rows;
  };

  /// Row of a strip at a position of it.
  int64_t row(const Part& part, int64_t position) const {
    return outputs_.order()[static_cast<size_t>(part.begin + position)] - part.strip.first();
  }

  Part part(const TensorView& weight, const PackedWeight& packed, int64_t begin, int64_t end) {
    const int64_t strip = outputs_.order()[static_cast<size_t>(begin)] / trellis_rows;
    std::vector<int32_t> indices(static_cast<size_t>(end - begin));
    std::iota(indices.begin(), indices.end(), static_cast<int32_t>(strip * trellis_rows));
    Part result{begin, RingStrip(packed, strip), FeedbackRows(weight, inputs_, std::move(indices))};
    StripValues importance{};
    for (int64_t i = 0; i < end - begin; ++i) {
      double sum = outputs_.pivots()[static_cast<size_t>(begin + i)];
      for (int64_t j = i + 1; j < end - begin; ++j) {
        const double coupling = outputs_.coupling().row(begin + j)[begin + i];
        sum += coupling * coupling * double{outputs_.pivots()[static_cast<size_t>(begin + j)]};
      }
      importance[static_cast<size_t>(row(result, i))] = static_cast<float>(sum);
    }
    result.strip.weigh(importance);
    return result;
  }

  /// By what the errors of strips before move a strip at these columns; rows by position.
  std::vector<float> shifts(const Part& part, int64_t from, int64_t to) const {
    const int64_t count = part.rows.rows(), width = to - from;
    std::vector<float> result(static_cast<size_t>(count * width));
    if (part.begin > 0) {
      kernels::gemm_nn({outputs_.coupling().row(part.begin), count, part.begin, outputs_.width()},
                       {residuals_.data() + from, part.begin, width, k_}, {result.data(), count, width});
    }
    for (int64_t i = 1; i < count; ++i) {
      const float* const coupling = outputs_.coupling().row(part.begin + i) + part.begin;
      for (int64_t earlier = 0; earlier < i; ++earlier) {
        for (int64_t c = 0; c < width; ++c) {
          result[static_cast<size_t>(i * width + c)] -=
              coupling[earlier] * result[static_cast<size_t>(earlier * width + c)];
        }
      }
    }
    return result;
  }

  void round(Part& part, size_t block) {
    const int64_t from = inputs_.block_starts()[block], to = inputs_.block_starts()[block + 1];
    const auto shift = shifts(part, from, to);
    for (int64_t i = 0; i < part.rows.rows(); ++i) {
      float* const weights = part.rows.weights(row(part, i)) + from;
      for (int64_t c = 0; c < to - from; ++c) weights[c] += shift[static_cast<size_t>(i * (to - from) + c)];
    }
    family_.round(part.rows, {0, part.rows.rows()}, block, part.strip);
    for (int64_t i = 0; i < part.rows.rows(); ++i) {
      const float* const errors = part.rows.errors(row(part, i)) + from;
      float* const residuals = residuals_.data() + (part.begin + i) * k_ + from;
      for (int64_t c = 0; c < to - from; ++c) {
        residuals[c] = errors[c] - shift[static_cast<size_t>(i * (to - from) + c)];
      }
    }
  }

  const ErrorFactor &inputs_, &outputs_;
  const TrellisFeedback& family_;
  int64_t k_;
  std::vector<Part> strips_;
  std::vector<float> residuals_;  // W − Ŵ, [n, k] by positions of both factors
};

}  // namespace

QuantizeResult trellis_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  PackedWeight packed = allocate_trellis(weight, scheme);
  const TrellisFeedback feedback(*options.input->feedback, packed);
  if (couples_rows(*options.input)) {
    TwoSidedStrips(weight, *options.input, feedback, packed).run();
  } else {
    CalibratedInput input = *options.input;
    input.outputs = nullptr;
    run_feedback(weight, input, feedback);
  }
  if (options.sweeps()) sweep_trellis(weight, *options.input, packed);
  const QuantizeStats stats = trellis_stats(packed);
  return {std::move(packed), stats};
}

}  // namespace w4q::quantize
