// Weights whose codes share bits (trellises, EXL3) held against the base where their codes stand, stream by stream: behind
// the rotations one wrong stream is a little noise in a hundred weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/linear/linear.h"
#include "verify/weights/limit.h"

namespace w4q::verify {

/// What is wrong with streams of a weight whose codes share bits (formats::shares_bits), behind its rotations and scales; one
/// line without the weight's name. Nothing where nothing is, of several passes, without rotations, and where the base's weight
/// is not known in its units. All of it is looked at, on all threads; EXL3 takes eight bytes a weight for it. `moved`: was_moved().
std::optional<std::string> stream_fault_of(const kernels::LinearWeight& base, const kernels::LinearWeight& candidate,
                                           const Units& units, bool moved);

}  // namespace w4q::verify
