// Sweeps of the trellis family: what feedback made goes on ring by ring (docs/trellis.md).
#pragma once

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Rounds over all columns, and the row at which a ring keeps its state in each: one search instead of two finds no worse
/// a ring than the one that stands.
inline constexpr int ring_seams[] = {64, 0};
/// What a round takes of the time that rounding takes, which goes over 48 weights on either side of the seam first.
inline constexpr double ring_sweep_share = 128.0 / (128 + 2 * 48);

/// As sweep (sweeps.h), for canonical planes of the trellis family: each ring is searched anew towards where the error
/// would be least, all others kept, and taken if the error falls – of the ring's strip of rows, which share its bits, or
/// where outputs have costs of all. The bytes do not depend on the number of threads.
void sweep_trellis(const TensorView& weight, const CalibratedInput& input, formats::PackedWeight& packed);

}  // namespace w4q::quantize
