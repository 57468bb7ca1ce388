#include "quantize/feedback.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/rotated.h"
#include "formats/scale_codec.h"
#include "quantize/feedback_rotated.h"
#include "quantize/feedback_rows.h"
#include "quantize/integer_simd.h"
#include "quantize/integer_trial.h"
#include "quantize/kbit_search.h"
#include "quantize/rtn.h"
#include "quantize/source_matrix.h"
#include "quantize/sweeps.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::SchemeFamily;

/// kbit: a panel of rows at a time.
class KbitFeedback {
 public:
  KbitFeedback(const ErrorFactor& factor, const KbitLevels& levels, Scales rule, PackedWeight& packed)
      : factor_(factor), levels_(levels), rule_(rule), packed_(packed) {}

  void run(FeedbackRows& rows) const {
    const auto starts = factor_.block_starts();
    for (size_t b = 0; b + 1 < starts.size(); ++b) {
      const MatrixView<const float> targets = rows.targets(starts[b], starts[b + 1]);
      for (int64_t r = 0; r < rows.rows(); r += panel_rows) panel(rows, targets, r, starts[b]);
    }
  }

 private:
  void panel(FeedbackRows& rows, MatrixView<const float> targets, int64_t first, int64_t position) const {
    const int64_t count = std::min<int64_t>(panel_rows, rows.rows() - first);
    alignas(64) std::array<float, kbit_block * panel_rows> target{}, weights{};
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t c = 0; c < targets.cols; ++c) {
        const auto at = static_cast<size_t>(c * panel_rows + r);
        target[at] = targets.row(first + r)[c];
        weights[at] = rows.weights(first + r)[position + c];
      }
    }
    const auto coupling = factor_.coupling();
    const PanelBlock block{.target = target.data(),
                           .weights = weights.data(),
                           .importance = factor_.pivots().data() + position,
                           .coupling = coupling.row(position) + position,
                           .coupling_stride = coupling.stride,
                           .columns = static_cast<int>(targets.cols)};
    const PanelScales scales = choose_scales(block, levels_, packed_.scheme.scale, rule_);
    PanelCodes codes;
    panel_codes(block, levels_, scales, codes);
    for (int64_t r = 0; r < count; ++r) {
      float* errors = rows.errors(first + r) + position;
      for (int64_t c = 0; c < targets.cols; ++c) {
        const auto at = static_cast<size_t>(c * panel_rows + r);
        errors[c] = weights[at] - codes.rounded[at];
      }
    }
    store(rows.first() + first, count, position, scales, codes, block.columns);
  }

  /// Codes stand by positions; they go where their columns are.
  void store(int64_t row, int64_t count, int64_t position, const PanelScales& scales, const PanelCodes& codes,
             int columns) const {
    const int64_t block = factor_.order()[static_cast<size_t>(position)] / kbit_block;
    PanelCodes placed{std::vector<uint8_t>(static_cast<size_t>(columns * panel_rows)), {}};
    for (int c = 0; c < columns; ++c) {
      const int64_t column = factor_.order()[static_cast<size_t>(position + c)] - block * kbit_block;
      std::copy_n(codes.codes.begin() + c * panel_rows, panel_rows,
                  placed.codes.begin() + static_cast<std::ptrdiff_t>(column) * panel_rows);
    }
    store_panel(packed_, row, count, block, scales, placed);
  }

  const ErrorFactor& factor_;
  const KbitLevels& levels_;
  Scales rule_;
  PackedWeight& packed_;
};

/// Integers: row by row, a group's columns in units whose coupling stays in the cache.
class IntegerFeedback {
 public:
  IntegerFeedback(const ErrorFactor& factor, Clip clip, PackedWeight& packed)
      : factor_(factor), clip_(clip), packed_(packed), groups_(formats::integer_groups(packed.scheme, packed.k)) {}

  QuantizeStats run(FeedbackRows& rows) const {
    const int64_t k = packed_.k;
    std::vector<uint8_t> codes(static_cast<size_t>(rows.rows() * k));
    std::vector<formats::IntegerScale> scales(static_cast<size_t>(rows.rows()));
    QuantizeStats stats;
    const auto starts = factor_.block_starts();
    for (size_t b = 0; b + 1 < starts.size(); ++b) {
      const MatrixView<float> targets = rows.targets(starts[b], starts[b + 1]);
      const int64_t group = factor_.order()[static_cast<size_t>(starts[b])] / factor_.block();
      std::optional<GroupTrial> trial;
      if (clip_ == Clip::mse && targets.cols <= widest_trial) trial.emplace(factor_, starts[b], targets.cols);
      for (int64_t r = 0; r < rows.rows(); ++r) {
        scales[static_cast<size_t>(r)] =
            choose(targets, r, rows.weights(r) + starts[b], trial ? &*trial : nullptr, stats);
        store(static_cast<size_t>((rows.first() + r) * groups_ + group), scales[static_cast<size_t>(r)]);
      }
      for (int64_t begin = starts[b]; begin < starts[b + 1]; begin += unit) {
        const int64_t end = std::min(begin + unit, starts[b + 1]);
        const MatrixView<float> part(targets.data + (begin - starts[b]), targets.rows, end - begin, targets.stride);
        rows.move(part, starts[b], begin, begin);
        round_unit(rows, part, begin, scales, codes);
      }
    }
    for (int64_t r = 0; r < rows.rows(); ++r) {
      formats::integer_write_codes(packed_, rows.first() + r,
                                   std::span(codes).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)));
    }
    return stats;
  }

 private:
  static constexpr int64_t unit = 32;

  formats::IntegerScale choose(MatrixView<const float> targets, int64_t row, const float* weights, GroupTrial* trial,
                               QuantizeStats& stats) const {
    const std::span<const float> values(targets.row(row), static_cast<size_t>(targets.cols));
    const Range range = group_range(values);
    const auto scale = trial == nullptr ? rtn_scale(packed_.scheme, values, range.low, range.high, clip_)
                                        : trial->best(packed_.scheme, values, weights, range);
    ++stats.blocks;
    stats.zero_blocks += range.low == range.high ? 1 : 0;
    stats.saturated_scales += scale.saturated ? 1 : 0;
    stats.subnormal_scales += scale.value < formats::scale_codec(packed_.scheme.scale).smallest_normal ? 1 : 0;
    return scale;
  }

  void round_unit(FeedbackRows& rows, MatrixView<float> targets, int64_t position,
                  std::span<const formats::IntegerScale> scales, std::span<uint8_t> codes) const {
    const auto coupling = factor_.coupling();
    float effect[unit][unit] = {};  // [from][to]
    for (int64_t to = 0; to < targets.cols; ++to) {
      for (int64_t from = 0; from < to; ++from) effect[from][to] = coupling.row(position + to)[position + from];
    }
    for (int64_t r = 0; r < targets.rows; ++r) {
      const auto& scale = scales[static_cast<size_t>(r)];
      float* target = targets.row(r);
      for (int64_t c = 0; c < targets.cols; ++c) {
        const uint8_t code = formats::integer_code(target[c], scale.value, scale.zero, packed_.scheme.bits);
        const float value = static_cast<float>(static_cast<int>(code) - scale.zero) * scale.value;
        const float error = rows.weights(r)[position + c] - value;
        rows.errors(r)[position + c] = error;
        codes[static_cast<size_t>(r * packed_.k + factor_.order()[static_cast<size_t>(position + c)])] = code;
        for (int64_t later = c + 1; later < targets.cols; ++later) target[later] += effect[c][later] * error;
      }
    }
  }

  void store(size_t index, const formats::IntegerScale& scale) const {
    formats::put_scale(packed_.plane(PlaneRole::scales), index, scale.bits);
    if (packed_.scheme.asymmetric) {
      packed_.plane(PlaneRole::zeros).bytes.as<uint8_t>()[index] = static_cast<uint8_t>(scale.zero);
    }
  }

  const ErrorFactor& factor_;
  Clip clip_;
  PackedWeight& packed_;
  int64_t groups_;
};

QuantizeResult kbit_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const ErrorFactor& factor = *options.input->feedback;
  const BlockMaxima maxima = find_block_maxima(weight);
  const auto importance = channel_importance(options, weight.shape[1]);
  const auto table = final_table(weight, scheme, maxima, importance, options);
  const int exponent = searched_range_exponent(maxima, scheme.scale);
  const auto codebook = formats::kbit_scaled_codebook(table, exponent);
  const KbitLevels levels(codebook);
  QuantizeResult result{allocate_canonical(weight, scheme, codebook), {}};
  const KbitFeedback feedback(factor, levels, options.scales(), result.weight);
  for_feedback_tasks(weight, factor, [&](FeedbackRows& rows, size_t) { feedback.run(rows); });
  if (options.sweeps()) sweep(weight, options, result.weight);
  result.stats = block_stats(result.weight, maxima, exponent);
  return result;
}

/// Counts anew what sweeps may have changed.
void count_scales(const PackedWeight& packed, QuantizeStats& stats) {
  const float smallest = formats::scale_codec(packed.scheme.scale).smallest_normal;
  const float largest = formats::integer_scale_max(packed.scheme);
  stats.saturated_scales = stats.subnormal_scales = 0;
  for (int64_t i = 0; i < stats.blocks; ++i) {
    const float scale = formats::load_scale(packed.plane(PlaneRole::scales), static_cast<size_t>(i));
    stats.saturated_scales += scale == largest ? 1 : 0;
    stats.subnormal_scales += scale < smallest ? 1 : 0;
  }
}

QuantizeResult integer_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const ErrorFactor& factor = *options.input->feedback;
  find_block_maxima(weight);  // refuses what is not finite
  QuantizeResult result{formats::allocate_integer(scheme, weight.shape[0], weight.shape[1]), {}};
  const IntegerFeedback feedback(factor, options.clip(), result.weight);
  std::vector<QuantizeStats> parts(
      static_cast<size_t>((weight.shape[0] + feedback_task_rows - 1) / feedback_task_rows));
  for_feedback_tasks(weight, factor, [&](FeedbackRows& rows, size_t task) { parts[task] = feedback.run(rows); });
  for (const QuantizeStats& part : parts) add(part, result.stats);
  if (options.sweeps()) {
    sweep(weight, options, result.weight);
    count_scales(result.weight, result.stats);
  }
  return result;
}

}  // namespace

int64_t feedback_block(const Scheme& scheme, int64_t k) noexcept {
  switch (scheme.family) {
    case SchemeFamily::integer:
      return formats::integer_group_size(scheme, k);
    case SchemeFamily::rotated:
      return formats::rotated_group(scheme, k);
    default:
      return kbit_block;
  }
}

QuantizeResult quantize_with_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  ensure(options.feeds_back(), "quantize_with_feedback: no factor");
  const ErrorFactor& factor = *options.input->feedback;
  if (scheme.act_order || scheme.family == SchemeFamily::lut) {
    throw Error(ErrorCode::unsupported, concat("there is no error feedback for ", to_string(scheme)));
  }
  check_weight(weight);
  if (factor.width() != weight.shape[1] || factor.block() != feedback_block(scheme, weight.shape[1])) {
    throw Error(ErrorCode::bad_argument, concat(printable(weight.name), ": the factor belongs to another input"))
        .detail(concat("expected ", weight.shape[1], " channels in blocks of ", feedback_block(scheme, weight.shape[1]),
                       ", got ", factor.width(), " in blocks of ", factor.block()));
  }
  switch (scheme.family) {
    case SchemeFamily::kbit:
      return kbit_feedback(weight, scheme, options);
    case SchemeFamily::rotated:
      return rotated_feedback(weight, scheme, options);
    default:
      return integer_feedback(weight, scheme, options);
  }
}

}  // namespace w4q::quantize
