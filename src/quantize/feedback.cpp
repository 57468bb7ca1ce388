#include "quantize/feedback.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/exl3.h"
#include "formats/integer.h"
#include "formats/rotated.h"
#include "formats/scale_codec.h"
#include "formats/trellis.h"
#include "quantize/feedback_float.h"
#include "quantize/feedback_rotated.h"
#include "quantize/feedback_rows.h"
#include "quantize/feedback_trellis.h"
#include "quantize/integer_simd.h"
#include "quantize/integer_trial.h"
#include "quantize/kbit_search.h"
#include "quantize/rtn.h"
#include "quantize/small_float.h"
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
class KbitFeedback final : public BlockFeedback {
 public:
  KbitFeedback(const ErrorFactor& factor, const KbitLevels& levels, Scales rule, PackedWeight& packed)
      : factor_(factor), levels_(levels), rule_(rule), packed_(packed) {}

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t begin = factor_.block_starts()[block];
    const MatrixView<const float> targets = rows.targets(part, begin, factor_.block_starts()[block + 1]);
    for (int64_t r = 0; r < part.count; r += panel_rows) {
      panel(rows, part.first + r,
            {targets.row(r), std::min<int64_t>(panel_rows, part.count - r), targets.cols, targets.stride}, begin);
    }
  }

 private:
  void panel(FeedbackRows& rows, int64_t first, MatrixView<const float> targets, int64_t position) const {
    const int64_t count = targets.rows;
    alignas(64) std::array<float, kbit_block * panel_rows> target{}, weights{};
    // A row alone stands in all lanes.
    for (int64_t r = 0; r < (count == 1 ? panel_rows : count); ++r) {
      const int64_t row = count == 1 ? 0 : r;
      for (int64_t c = 0; c < targets.cols; ++c) {
        const auto at = static_cast<size_t>(c * panel_rows + r);
        target[at] = targets.row(row)[c];
        weights[at] = rows.weights(first + row)[position + c];
      }
    }
    const auto coupling = factor_.coupling();
    const PanelBlock block{.target = target.data(),
                           .weights = weights.data(),
                           .importance = factor_.pivots().data() + position,
                           .coupling = coupling.row(position) + position,
                           .coupling_stride = coupling.stride,
                           .columns = static_cast<int>(targets.cols),
                           .row_alone = count == 1};
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
    store(rows, {first, count}, position, scales, codes, block.columns);
  }

  /// Codes stand by positions; they go where their columns are.
  void store(const FeedbackRows& rows, RowRange part, int64_t position, const PanelScales& scales,
             const PanelCodes& codes, int columns) const {
    const int64_t block = factor_.order()[static_cast<size_t>(position)] / kbit_block;
    PanelCodes placed{std::vector<uint8_t>(static_cast<size_t>(columns * panel_rows)), {}};
    for (int c = 0; c < columns; ++c) {
      const int64_t column = factor_.order()[static_cast<size_t>(position + c)] - block * kbit_block;
      std::copy_n(codes.codes.begin() + c * panel_rows, panel_rows,
                  placed.codes.begin() + static_cast<std::ptrdiff_t>(column) * panel_rows);
    }
    // Rows stand one behind the other, but where each goes by itself.
    store_panel(packed_, rows.index(part.first), part.count, block, scales, placed);
  }

  const ErrorFactor& factor_;
  const KbitLevels& levels_;
  Scales rule_;
  PackedWeight& packed_;
};

/// Integers: row by row, a group's columns in units whose coupling stays in the cache.
class IntegerFeedback final : public BlockFeedback {
 public:
  IntegerFeedback(const ErrorFactor& factor, Clip clip, PackedWeight& packed)
      : factor_(factor), clip_(clip), packed_(packed), groups_(formats::integer_groups(packed.scheme, packed.k)) {}

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t first = factor_.block_starts()[block], last = factor_.block_starts()[block + 1];
    const MatrixView<float> targets = rows.targets(part, first, last);
    const int64_t group = factor_.order()[static_cast<size_t>(first)] / factor_.block();
    std::vector<formats::IntegerScale> scales(static_cast<size_t>(part.count));
    std::optional<GroupTrial> trial;
    if (clip_ == Clip::mse && targets.cols <= widest_trial) trial.emplace(factor_, first, targets.cols);
    for (int64_t r = 0; r < part.count; ++r) {
      const int64_t row = part.first + r;
      scales[static_cast<size_t>(r)] =
          choose(targets, r, rows.weights(row) + first, trial ? &*trial : nullptr, rows.stats(row));
      store(static_cast<size_t>(rows.index(row) * groups_ + group), scales[static_cast<size_t>(r)]);
    }
    for_units(rows, part, targets, first,
              [&](MatrixView<float> some, int64_t position) { round_unit(rows, part, some, position, scales); });
  }

  void finish(FeedbackRows& rows) const override {
    for (int64_t r = 0; r < rows.rows(); ++r) formats::integer_write_codes(packed_, rows.index(r), rows.codes(r));
  }

 private:
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

  void round_unit(FeedbackRows& rows, RowRange part, MatrixView<float> targets, int64_t position,
                  std::span<const formats::IntegerScale> scales) const {
    const auto coupling = factor_.coupling();
    float effect[feedback_unit][feedback_unit] = {};  // [from][to]
    for (int64_t to = 0; to < targets.cols; ++to) {
      for (int64_t from = 0; from < to; ++from) effect[from][to] = coupling.row(position + to)[position + from];
    }
    for (int64_t r = 0; r < targets.rows; ++r) {
      const auto& scale = scales[static_cast<size_t>(r)];
      const int64_t row = part.first + r;
      const float* weights = rows.weights(row) + position;
      float* const errors = rows.errors(row) + position;
      const auto codes = rows.codes(row);
      float* target = targets.row(r);
      for (int64_t c = 0; c < targets.cols; ++c) {
        const uint8_t code = formats::integer_code(target[c], scale.value, scale.zero, packed_.scheme.bits);
        const float value = static_cast<float>(static_cast<int>(code) - scale.zero) * scale.value;
        errors[c] = weights[c] - value;
        codes[static_cast<size_t>(factor_.order()[static_cast<size_t>(position + c)])] = code;
        for (int64_t later = c + 1; later < targets.cols; ++later) target[later] += effect[c][later] * errors[c];
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
  const int exponent = table_exponent(maxima, scheme.scale, options);
  const auto codebook = formats::kbit_scaled_codebook(table, exponent);
  const KbitLevels levels(codebook);
  QuantizeResult result{allocate_canonical(weight, scheme, codebook), {}};
  const KbitFeedback feedback(factor, levels, options.scales(), result.weight);
  run_feedback(weight, *options.input, feedback);
  if (options.sweeps()) sweep(weight, options, result.weight);
  result.stats = block_stats(result.weight, maxima, exponent);
  return result;
}

QuantizeResult integer_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const ErrorFactor& factor = *options.input->feedback;
  find_block_maxima(weight);  // refuses what is not finite
  QuantizeResult result{formats::allocate_integer(scheme, weight.shape[0], weight.shape[1]), {}};
  const IntegerFeedback feedback(factor, options.clip(), result.weight);
  result.stats = run_feedback(weight, *options.input, feedback);
  if (options.sweeps()) {
    sweep(weight, options, result.weight);
    count_scales(result.weight, result.stats);
  }
  return result;
}

}  // namespace

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

int64_t feedback_block(const Scheme& scheme, int64_t k) noexcept {
  switch (scheme.family) {
    case SchemeFamily::integer:
      return formats::integer_group_size(scheme, k);
    case SchemeFamily::rotated:
      return formats::rotated_group(scheme, k);
    case SchemeFamily::exl3:
      return formats::exl3_tile;
    case SchemeFamily::trellis:
      return trellis_feedback_block;
    case SchemeFamily::small_float:  // a tensor's columns may stand in any order; such blocks cost little
      return scheme.block == formats::whole_tensor ? trellis_feedback_block : float_block(scheme, k);
    case SchemeFamily::lut:
      return scheme.block;
    default:
      return kbit_block;
  }
}

int64_t output_block(const Scheme& scheme) noexcept {
  return scheme.family == SchemeFamily::trellis ? formats::trellis_rows : 1;
}

QuantizeResult quantize_with_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  ensure(options.feeds_back(), "quantize_with_feedback: no factor");
  const ErrorFactor& factor = *options.input->feedback;
  if (scheme.act_order) {
    throw Error(ErrorCode::unsupported, concat("there is no error feedback for ", to_string(scheme)));
  }
  check_weight(weight);
  if (factor.width() != weight.shape[1] || factor.block() != feedback_block(scheme, weight.shape[1])) {
    throw Error(ErrorCode::bad_argument, concat(printable(weight.name), ": the factor belongs to another input"))
        .detail(concat("expected ", weight.shape[1], " channels in blocks of ", feedback_block(scheme, weight.shape[1]),
                       ", got ", factor.width(), " in blocks of ", factor.block()));
  }
  if (const ErrorFactor* outputs = options.input->outputs; outputs != nullptr) {
    if (outputs->width() != weight.shape[0] || outputs->block() != output_block(scheme)) {
      throw Error(ErrorCode::bad_argument, concat(printable(weight.name), ": the factor belongs to other outputs"))
          .detail(concat("expected ", weight.shape[0], " outputs in blocks of ", output_block(scheme), ", got ",
                         outputs->width(), " in blocks of ", outputs->block()));
    }
  }
  switch (scheme.family) {
    case SchemeFamily::kbit:
      return kbit_feedback(weight, scheme, options);
    case SchemeFamily::rotated:
      return rotated_feedback(weight, scheme, options);
    case SchemeFamily::trellis:
      return trellis_feedback(weight, scheme, options);
    case SchemeFamily::small_float:
    case SchemeFamily::lut:
      return float_feedback(weight, scheme, options);
    default:
      return integer_feedback(weight, scheme, options);
  }
}

}  // namespace w4q::quantize
