// A step of the search for rings of a trellis, in vectors: the bits of formats::trellis_plain_step() (class E0), since
// states are lanes that never meet.
#pragma once

#include <span>
#include <vector>

#include "formats/trellis_search.h"

namespace w4q::quantize {

/// The levels of a window as trellis_fast_step() wants them on this machine.
std::vector<float> trellis_fast_levels(int bits, int window);
/// The same of any code's levels, by windows.
std::vector<float> trellis_fast_levels(int bits, std::span<const float> levels);

/// formats::TrellisStep with levels of trellis_fast_levels().
void trellis_fast_step(int bits, int window, const float* least, const float* levels, float target, float* next);

}  // namespace w4q::quantize
