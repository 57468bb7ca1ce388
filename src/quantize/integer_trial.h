// Integer groups of one row, rounded with error feedback inside them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "formats/integer.h"
#include "quantize/error_factor.h"
#include "quantize/integer_simd.h"

namespace w4q::quantize {

/// Groups of more columns choose their range without feedback: its cost grows with their square.
inline constexpr int64_t widest_trial = 256;

/// Rounds one row of an integer group with different ranges, its errors fed back inside the group.
class GroupTrial {
 public:
  /// The columns at positions [position, position + columns) of a factor, which must outlive this.
  GroupTrial(const ErrorFactor& factor, int64_t position, int64_t columns);

  /// The scale with the least error among the shares of the range that Clip::mse tries; ties go to the larger share.
  formats::IntegerScale best(const formats::Scheme& scheme, std::span<const float> targets, const float* weights,
                             const Range& range);

  /// Σ D_j·(…)² with that scale. A column's target is moved by the errors of those before it against `weights`; `codes`
  /// gets what is chosen, unless it is null. Sums that reach `limit` are left there.
  double round(int bits, std::span<const float> targets, const float* weights, const formats::IntegerScale& scale,
               uint8_t* codes = nullptr, double limit = std::numeric_limits<double>::infinity());

 private:
  std::span<const float> pivots_;
  std::vector<float> effects_;  // [from][to]
  std::vector<float> moved_;
};

}  // namespace w4q::quantize
