// Norms of the rotated family, and the scales that rows of a trellis have, by least squares: codes stay as they are, and the norms of each row become those with
// the least error of its output over calibration rows (docs/rotated.md). A row of k / d groups is a linear system of as
// many unknowns; one product of the levels with the Gram matrix sets up all of them.
#pragma once

#include "core/views.h"
#include "formats/packed.h"

namespace w4q::quantize {

/// Of the normal equations: far below what calibration text says, enough where it says nothing.
inline constexpr double norm_damping = 1e-3;

/// `packed`: canonical planes of the rotated or the trellis family; `weight` n × k is what they were made from and `gram` k × k the
/// mean of xᵀx, both in their basis. `damping`, a share of the diagonal, holds norms where they are. A row keeps its
/// norms unless those that can be stored are better. Returns the rows that changed. Throws internal when shapes differ.
int64_t calibrate_norms(formats::PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram,
                        double damping);

}  // namespace w4q::quantize
