// The rows of the layout registry: one file defines each.
#pragma once

#include "repack/layout_registry.h"

namespace w4q::repack {

LayoutRow canonical_row();
LayoutRow kbit_fragment_row();
LayoutRow kbit_tile_row();
LayoutRow awq_row();
LayoutRow gptq_row();
LayoutRow interleaved_row();
LayoutRow marlin_row();
LayoutRow rotated_fragment_row();
LayoutRow trellis_fragment_row();
LayoutRow float_fragment_row();

}  // namespace w4q::repack
