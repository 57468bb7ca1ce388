#include "quantize/feedback_rotated.h"

#include <cmath>

#include "formats/kbit.h"
#include "formats/rotated.h"
#include "formats/scheme_registry.h"
#include "quantize/feedback_rows.h"
#include "quantize/kbit.h"
#include "quantize/rotated.h"
#include "quantize/rtn.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredNorm;

class RotatedFeedback {
 public:
  RotatedFeedback(const ErrorFactor& factor, Scales rule, PackedWeight& packed)
      : factor_(factor),
        rule_(rule),
        packed_(packed),
        group_(formats::rotated_group(packed.scheme, packed.k)),
        groups_(formats::rotated_groups(packed.scheme, packed.k)),
        gain_(formats::rotated_gain(codebook(), packed.scheme.bits)),
        table_(codebook(), group_) {}

  QuantizeStats run(FeedbackRows& rows) {
    QuantizeStats stats;
    std::vector<float> norms(static_cast<size_t>(rows.rows()));
    const auto starts = factor_.block_starts();
    for (size_t b = 0; b + 1 < starts.size(); ++b) {
      const MatrixView<float> targets = rows.targets(starts[b], starts[b + 1]);
      const int64_t group = factor_.order()[static_cast<size_t>(starts[b])] / group_;
      for (int64_t r = 0; r < rows.rows(); ++r) {
        const auto index = static_cast<size_t>((rows.first() + r) * groups_ + group);
        norms[static_cast<size_t>(r)] = choose(targets, r, starts[b], index, stats);
      }
      for (int64_t begin = starts[b]; begin < starts[b + 1]; begin += unit) {
        const int64_t end = std::min(begin + unit, starts[b + 1]);
        const MatrixView<float> part(targets.data + (begin - starts[b]), targets.rows, end - begin, targets.stride);
        rows.move(part, starts[b], begin, begin);
        round_unit(rows, part, begin, norms);
      }
    }
    return stats;
  }

 private:
  static constexpr int64_t unit = 32;

  std::span<const float> codebook() const { return packed_.plane(PlaneRole::codebook).bytes.as<float>(); }

  float choose(MatrixView<const float> targets, int64_t row, int64_t position, size_t index, QuantizeStats& stats) {
    const std::span values(targets.row(row), static_cast<size_t>(targets.cols));
    const double norm = formats::rotated_norm(values, group_);
    StoredNorm stored = formats::rotated_store_norm(norm / gain_, packed_.scheme.scale);
    if (rule_ == Scales::search) {
      const auto pivots = factor_.pivots().subspan(static_cast<size_t>(position), values.size());
      stored = search_norm(values, pivots, table_, stored, packed_.scheme.scale);
    }
    formats::rotated_put_norm(packed_.plane(PlaneRole::scales), index, stored);
    ++stats.blocks;
    stats.zero_blocks += norm == 0 ? 1 : 0;
    stats.saturated_scales += stored.saturated ? 1 : 0;
    const float least = formats::rotated_scale_min_normal(packed_.scheme.scale);
    stats.subnormal_scales += norm != 0 && stored.value < least ? 1 : 0;
    return stored.value;
  }

  void round_unit(FeedbackRows& rows, MatrixView<float> targets, int64_t position, std::span<const float> norms) {
    const auto coupling = factor_.coupling();
    for (int64_t r = 0; r < targets.rows; ++r) {
      const float norm = norms[static_cast<size_t>(r)];
      float* target = targets.row(r);
      float* errors = rows.errors(r) + position;
      for (int64_t c = 0; c < targets.cols; ++c) {
        const float* effect = coupling.row(position + c) + position;
        for (int64_t earlier = 0; earlier < c; ++earlier) target[c] += effect[earlier] * errors[earlier];
        const int code = formats::kbit_code(norm == 0 ? 0.0f : target[c] / norm, table_.midpoints);
        errors[c] = rows.weights(r)[position + c] - table_.levels[static_cast<size_t>(code)] * norm;
        store(rows.first() + r, factor_.order()[static_cast<size_t>(position + c)], static_cast<uint32_t>(code));
      }
    }
  }

  void store(int64_t row, int64_t column, uint32_t code) {
    const auto words = packed_.plane(PlaneRole::codes).bytes.as<uint32_t>();
    const int64_t bits = packed_.scheme.bits;
    const int64_t first = (row * formats::kbit_blocks(packed_.k) + column / kbit_block) * bits;
    for (int64_t bit = 0; bit < bits; ++bit) {
      words[static_cast<size_t>(first + bit)] |= (code >> bit & 1u) << (column % kbit_block);
    }
  }

  const ErrorFactor& factor_;
  Scales rule_;
  PackedWeight& packed_;
  int64_t group_, groups_;
  double gain_;
  RotatedLevels table_;
};

/// The exponent of the codebook's factor. Norms are those of groups as large as their weights' maxima allow: moving
/// weights changes them little beside the range of a type.
int range_exponent(const BlockMaxima& maxima, const Scheme& scheme, int64_t k, double gain) {
  const double width = std::sqrt(static_cast<double>(formats::rotated_group(scheme, k)));
  return rotated_range_exponent(maxima.smallest / gain, maxima.largest * width / gain, scheme.scale);
}

}  // namespace

QuantizeResult rotated_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  QuantizeOptions plain = options;
  plain.input = nullptr;
  check_rotated(scheme, plain);
  const ErrorFactor& factor = *options.input->feedback;
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const BlockMaxima maxima = find_block_maxima(weight);
  const auto table = rotated_table(scheme, options);
  const int exponent = range_exponent(maxima, scheme, k, formats::rotated_gain(table, scheme.bits));
  const auto codebook = formats::kbit_scaled_codebook(table, exponent);
  const auto planes = formats::scheme_row(scheme.family).planes(scheme, n, k);
  QuantizeResult result{formats::allocate_planes(scheme, formats::canonical_layout, n, k, planes), {}};
  std::ranges::copy(codebook, result.weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  RotatedFeedback feedback(factor, options.scales, result.weight);
  std::vector<QuantizeStats> parts(static_cast<size_t>((n + feedback_task_rows - 1) / feedback_task_rows));
  for_feedback_tasks(weight, factor, [&](FeedbackRows& rows, size_t task) { parts[task] = feedback.run(rows); });
  for (const QuantizeStats& part : parts) add(part, result.stats);
  result.stats.range_exponent = exponent;
  return result;
}

}  // namespace w4q::quantize
