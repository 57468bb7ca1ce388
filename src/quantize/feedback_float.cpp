#include "quantize/feedback_float.h"

#include <algorithm>
#include <vector>

#include "formats/codebook.h"
#include "formats/table/table_format.h"
#include "quantize/feedback.h"
#include "quantize/feedback_rows.h"
#include "quantize/kbit_search.h"
#include "quantize/lut.h"
#include "quantize/small_float.h"
#include "quantize/sweeps.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

bool is_lut(const Scheme& scheme) { return scheme.family == formats::SchemeFamily::lut; }

/// Scales that are chosen before: those that rows share, and those that are made of all blocks' at once.
bool keeps_scales(const Scheme& scheme) {
  return formats::shares_rows(scheme) || scheme.scale == formats::ScaleType::nested;
}

KbitLevels levels_of(const PackedWeight& packed) {
  if (is_lut(packed.scheme)) return KbitLevels(packed.plane(PlaneRole::codebook).bytes.as<const float>());
  return KbitLevels::small_floats(packed.scheme.bits, float_factor(packed));
}

class FloatFeedback final : public BlockFeedback {
 public:
  FloatFeedback(const ErrorFactor& factor, Scales rule, PackedWeight& packed)
      : factor_(factor),
        rule_(rule),
        packed_(packed),
        format_(formats::scheme_row(packed.scheme.family).table(packed.scheme)),
        levels_(levels_of(packed)) {}

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t first = factor_.block_starts()[block], last = factor_.block_starts()[block + 1];
    const MatrixView<float> targets = rows.targets(part, first, last);
    const std::vector<float> scales = choose(rows, part, targets, first);
    for_units(rows, part, targets, first,
              [&](MatrixView<float> some, int64_t position) { round_unit(rows, part, some, position, scales); });
  }

  void finish(FeedbackRows& rows) const override {
    for (int64_t r = 0; r < rows.rows(); ++r) {
      formats::table_write_codes(format_, packed_, rows.index(r), rows.codes(r));
    }
  }

 private:
  /// Where the scale of a row at `position` is stored.
  int64_t index_of(const FeedbackRows& rows, int64_t row, int64_t position) const {
    const int64_t column = factor_.order()[static_cast<size_t>(position)];
    return formats::table_place(format_, packed_.k, rows.index(row), column, 0).scale;
  }

  /// The scale of every row of a part, the tensor's factor included.
  std::vector<float> choose(FeedbackRows& rows, RowRange part, MatrixView<const float> targets,
                            int64_t position) const {
    std::vector<float> scales(static_cast<size_t>(part.count));
    if (keeps_scales(packed_.scheme)) {
      for (int64_t r = 0; r < part.count; ++r) {
        scales[static_cast<size_t>(r)] =
            formats::full_scale_at(format_, packed_, index_of(rows, part.first + r, position));
      }
      return scales;
    }
    std::vector<formats::StoredScale> found;
    if (rule_ == Scales::search) {
      found = searched_row_scales(factor_, rows, part, targets, position, levels_, packed_.scheme.scale);
    } else {
      for (int64_t r = 0; r < part.count; ++r) {
        const float absmax = formats::table_max({targets.row(r), static_cast<size_t>(targets.cols)});
        found.push_back(is_lut(packed_.scheme) ? formats::store_scale(absmax, packed_.scheme.scale)
                                               : formats::small_float_scale(packed_.scheme, absmax, levels_.factor));
        found.back().value *= levels_.factor;
      }
    }
    for (int64_t r = 0; r < part.count; ++r) {
      const auto& scale = found[static_cast<size_t>(r)];
      formats::put_scale(packed_.plane(PlaneRole::scales),
                         static_cast<size_t>(index_of(rows, part.first + r, position)), scale.bits);
      scales[static_cast<size_t>(r)] = scale.value;
    }
    return scales;
  }

  void round_unit(FeedbackRows& rows, RowRange part, MatrixView<float> targets, int64_t position,
                  std::span<const float> scales) const {
    round_columns(factor_, rows, part, targets, position, [&](int64_t r, int64_t column, float target) {
      const float scale = scales[static_cast<size_t>(r)];
      const uint8_t code = code_of(target, scale);
      rows.codes(part.first + r)[static_cast<size_t>(column)] = code;
      return levels_.level(code) * scale;
    });
  }

  uint8_t code_of(float target, float scale) const noexcept {
    if (levels_.floats) return formats::small_float_code(target / scale, levels_.bits);
    const auto midpoints = std::span(levels_.midpoints).first((size_t{1} << levels_.bits) - 1);
    return static_cast<uint8_t>(formats::kbit_code(scale == 0 ? 0.0f : target / scale, midpoints));
  }

  const ErrorFactor& factor_;
  Scales rule_;
  PackedWeight& packed_;
  formats::TableFormat format_;
  KbitLevels levels_;
};

/// Planes, and the scales that are chosen before.
QuantizeResult prepared(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  if (is_lut(scheme)) {
    check_lut(weight, scheme, options);
    return allocate_lut(weight, scheme, options);
  }
  check_small_float(scheme, options);
  const FloatMaxima maxima = find_float_maxima(weight, scheme);
  QuantizeResult result{allocate_small_float(weight, scheme, maxima, options), {}};
  if (formats::shares_rows(scheme)) {
    const auto importance = channel_importance(options, weight.shape[1]);
    choose_shared_scales(weight, maxima, importance, options.scales(), result.weight);
  }
  return result;
}

}  // namespace

QuantizeResult float_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  QuantizeResult result = prepared(weight, scheme, options);
  const FloatFeedback feedback(*options.input->feedback, options.scales(), result.weight);
  run_feedback(weight, *options.input, feedback);
  if (options.sweeps()) sweep(weight, options, result.weight);
  if (!is_lut(scheme)) result.stats = float_stats(result.weight, find_float_maxima(weight, scheme));
  return result;
}

}  // namespace w4q::quantize
