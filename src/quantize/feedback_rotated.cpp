#include "quantize/feedback_rotated.h"

#include <cmath>

#include "formats/kbit.h"
#include "formats/rotated.h"
#include "quantize/feedback_rows.h"
#include "quantize/kbit.h"
#include "quantize/rotated.h"
#include "quantize/sweeps.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

class RotatedFeedback final : public BlockFeedback {
 public:
  RotatedFeedback(const ErrorFactor& factor, Scales rule, PackedWeight& packed)
      : factor_(factor),
        rule_(rule),
        packed_(packed),
        group_(formats::rotated_group(packed.scheme, packed.k)),
        groups_(formats::rotated_groups(packed.scheme, packed.k)),
        gain_(formats::rotated_gain(codebook(), packed.scheme.bits)),
        table_(codebook(), group_),
        search_levels_(table_.levels) {}

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t first = factor_.block_starts()[block], last = factor_.block_starts()[block + 1];
    std::vector<float> norms(static_cast<size_t>(part.count));
    const MatrixView<float> targets = rows.targets(part, first, last);
    if (rule_ == Scales::search) {
      search(rows, part, targets, first, norms);
    } else {
      measure(rows, part, targets, first, norms);
    }
    for_units(rows, part, targets, first,
              [&](MatrixView<float> some, int64_t position) { round_unit(rows, part, some, position, norms); });
  }

 private:
  std::span<const float> codebook() const { return packed_.plane(PlaneRole::codebook).bytes.as<float>(); }

  /// Where the norm of a row's group at `position` is stored.
  size_t index_of(const FeedbackRows& rows, int64_t row, int64_t position) const {
    const int64_t group = factor_.order()[static_cast<size_t>(position)] / group_;
    return static_cast<size_t>(rows.index(row) * groups_ + group);
  }

  /// Norms as they are.
  void measure(const FeedbackRows& rows, RowRange part, MatrixView<const float> targets, int64_t position,
               std::span<float> norms) const {
    for (int64_t r = 0; r < part.count; ++r) {
      const double norm = formats::rotated_norm({targets.row(r), static_cast<size_t>(targets.cols)}, group_);
      const auto stored = formats::rotated_scale(norm / gain_, packed_.scheme.scale);
      formats::put_scale(packed_.plane(PlaneRole::scales), index_of(rows, part.first + r, position), stored.bits);
      norms[static_cast<size_t>(r)] = stored.value;
    }
  }

  /// The norms with the least error once the group is rounded.
  void search(FeedbackRows& rows, RowRange part, MatrixView<const float> targets, int64_t position,
              std::span<float> norms) const {
    const auto found =
        searched_row_scales(factor_, rows, part, targets, position, search_levels_, packed_.scheme.scale);
    for (int64_t r = 0; r < part.count; ++r) {
      const auto& norm = found[static_cast<size_t>(r)];
      formats::put_scale(packed_.plane(PlaneRole::scales), index_of(rows, part.first + r, position), norm.bits);
      norms[static_cast<size_t>(r)] = norm.value;
    }
  }

  void round_unit(FeedbackRows& rows, RowRange part, MatrixView<float> targets, int64_t position,
                  std::span<const float> norms) const {
    round_columns(factor_, rows, part, targets, position, [&](int64_t r, int64_t column, float target) {
      const float norm = norms[static_cast<size_t>(r)];
      const int code = formats::kbit_code(norm == 0 ? 0.0f : target / norm, table_.midpoints);
      store(rows.index(part.first + r), column, static_cast<uint32_t>(code));
      return table_.levels[static_cast<size_t>(code)] * norm;
    });
  }

  void store(int64_t row, int64_t column, uint32_t code) const {
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
  KbitLevels search_levels_;
};

/// The exponent of the codebook's factor. Norms are those of groups as large as their weights' maxima allow: moving
/// weights changes them little beside the range of a type.
int range_exponent(const BlockMaxima& maxima, const Scheme& scheme, int64_t k, double gain) {
  const double width = std::sqrt(static_cast<double>(formats::rotated_group(scheme, k)));
  return rotated_range_exponent(maxima.smallest / gain, maxima.largest * width / gain, scheme.scale);
}

}  // namespace

QuantizeResult rotated_feedback(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_rotated(scheme, options);
  const ErrorFactor& factor = *options.input->feedback;
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const BlockMaxima maxima = find_block_maxima(weight);
  const auto table = rotated_table(scheme, options);
  const int exponent = range_exponent(maxima, scheme, k, formats::rotated_gain(table, scheme.bits));
  PackedWeight packed = allocate_rotated(scheme, n, k, table, exponent);
  const RotatedFeedback feedback(factor, options.scales(), packed);
  run_feedback(weight, *options.input, feedback);
  if (options.sweeps()) sweep(weight, options, packed);
  const QuantizeStats stats = rotated_stats(packed, exponent);
  return {std::move(packed), stats};
}

}  // namespace w4q::quantize
