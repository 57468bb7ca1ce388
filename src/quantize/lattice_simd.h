// The inner loops of gguf_lattice.h by vectors: sixteen scales at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/gguf_lattice.h"

namespace w4q::quantize {

/// Points of a group: what their products with its weights and with themselves sum up to, [points].
struct LatticePoints {
  const float* cross = nullptr;
  const float* self = nullptr;
  const uint16_t* codes = nullptr;  ///< those to look at; null: all
  size_t count = 0;                 ///< so many
};

/// Of each scale [16] the point with the least scale · (scale · self) − (2 · scale) · cross, of equal ones the first: its
/// code and that error, [16] each. The same for every instruction set.
void nearest_points(const LatticePoints& points, const float* scales, float* errors, uint16_t* codes);

/// cross += product · level and self += weight · level², for all `count` points.
void add_levels(const float* levels, size_t count, float product, float weight, float* cross, float* self);

}  // namespace w4q::quantize
