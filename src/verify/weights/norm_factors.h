// What a norm that scales were folded into gave away: the ratio of its two versions, as far as its 16-bit type can say.
#pragma once

#include <string>
#include <vector>

#include "core/views.h"

namespace w4q::verify {

/// What the channel behind a norm was multiplied by.
struct NormFactor {
  float factor = 1;  ///< the ratio of the two as they are stored; 1 where one of them is nothing
  float least = 1,
        most = 1;  ///< what rounding to the stored type may have left of any factor in between; `most` may be infinite
  bool known = true;     ///< to the rounding of a norm that is stored as it is, 2^-8
  bool possible = true;  ///< that it is positive

  /// `measured`, or what lies nearest to it of all that the norm may have given; `factor` where nothing was measured (0).
  float nearest(float measured) const noexcept;
};

/// Of a norm x̂ · (w + offset), now and in the base; equal shapes. Where offset is 1, a channel that is next to nothing is stored as a
/// number near −1, whose rounding is as large as the channel: then the factor is known within wide bounds only.
std::vector<NormFactor> norm_factors(const TensorView& ours, const TensorView& theirs, float offset);

/// Why no folding leaves such a norm: factors that are not positive, or the same in all channels; empty: one may.
std::string factors_fault(const TensorView& ours, const TensorView& theirs, float offset);

/// Half the distance of the neighbours of `value` in a weight's type.
double half_unit(double value, DType dtype) noexcept;

}  // namespace w4q::verify
