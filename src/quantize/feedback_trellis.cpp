#include "quantize/feedback_trellis.h"

#include <algorithm>
#include <array>

#include "formats/trellis.h"
#include "quantize/feedback_rows.h"
#include "quantize/trellis.h"
#include "quantize/trellis_simd.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::Scheme;
using formats::trellis_rows;

/// A strip of rows in a block of columns, column after column.
using StripBlock = std::array<std::array<float, trellis_rows>, trellis_feedback_block>;

class TrellisFeedback final : public BlockFeedback {
 public:
  TrellisFeedback(const ErrorFactor& factor, PackedWeight& packed)
      : factor_(factor), packed_(packed), levels_(trellis_fast_levels(packed.scheme.bits, packed.scheme.window)) {}

  int64_t task_rows() const noexcept override { return trellis_rows; }

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t begin = factor_.block_starts()[block], width = factor_.block_starts()[block + 1] - begin;
    const MatrixView<const float> targets = rows.targets(part, begin, begin + width);
    auto moved = std::make_unique<StripBlock>();
    for (int64_t r = 0; r < part.count; ++r) {
      for (int64_t c = 0; c < width; ++c) (*moved)[static_cast<size_t>(c)][static_cast<size_t>(r)] = targets.row(r)[c];
    }
    const Strip strip(rows, part, packed_);
    auto search = trellis_search(packed_.scheme, levels_);
    for (int64_t c = 0; c < width; ++c) {
      const auto errors = strip.round(search, (*moved)[static_cast<size_t>(c)], begin + c,
                                      factor_.order()[static_cast<size_t>(begin + c)]);
      for (int64_t later = c + 1; later < width; ++later) {
        const float effect = factor_.coupling().row(begin + later)[begin + c];
        auto& target = (*moved)[static_cast<size_t>(later)];
        for (size_t r = 0; r < trellis_rows; ++r) target[r] += effect * errors[r];
      }
    }
  }

 private:
  /// Rows of a task and what their levels are multiplied by.
  class Strip {
   public:
    Strip(FeedbackRows& rows, RowRange part, PackedWeight& packed)
        : rows_(rows), part_(part), strip_(rows.index(part.first) / trellis_rows), packed_(packed) {
      column_.rows = static_cast<int>(part.count);
      for (int64_t r = 0; r < part.count; ++r) {
        const float step = formats::trellis_load_scale(packed, rows.index(part.first + r)).step;
        steps_[static_cast<size_t>(r)] = step;
        column_.counts[static_cast<size_t>(r)] = step > 0;
      }
    }

    /// Rounds a column; returns what it misses the weights by.
    std::array<float, trellis_rows> round(formats::TrellisSearch& search,
                                          const std::array<float, trellis_rows>& targets, int64_t position,
                                          int64_t column) const {
      formats::TrellisColumn wanted = column_;
      for (size_t r = 0; r < static_cast<size_t>(part_.count); ++r) {
        if (wanted.counts[r]) wanted.targets[r] = targets[r] / steps_[r];
      }
      const auto ring = formats::trellis_ring(packed_, strip_, column);
      formats::trellis_put(search(wanted), packed_.scheme.bits, ring);
      std::array<float, trellis_rows> errors{};
      for (int64_t r = 0; r < part_.count; ++r) {
        const uint32_t window =
            formats::trellis_window(ring, packed_.scheme.bits, packed_.scheme.window, static_cast<int>(r));
        const float value = static_cast<float>(formats::trellis_level(window)) * steps_[static_cast<size_t>(r)];
        errors[static_cast<size_t>(r)] = rows_.weights(part_.first + r)[position] - value;
        rows_.errors(part_.first + r)[position] = errors[static_cast<size_t>(r)];
      }
      return errors;
    }

   private:
    FeedbackRows& rows_;
    RowRange part_;
    int64_t strip_;
    PackedWeight& packed_;
    formats::TrellisColumn column_;
    std::array<float, trellis_rows> steps_{};
  };

  const ErrorFactor& factor_;
  PackedWeight& packed_;
  std::vector<float> levels_;
};

}  // namespace

QuantizeResult trellis_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  PackedWeight packed = allocate_trellis(weight, scheme);
  const TrellisFeedback feedback(*options.input->feedback, packed);
  CalibratedInput input = *options.input;
  input.outputs = nullptr;  // rows of a ring are rounded at once: none can make up for another
  run_feedback(weight, input, feedback);
  const QuantizeStats stats = trellis_stats(packed);
  return {std::move(packed), stats};
}

}  // namespace w4q::quantize
