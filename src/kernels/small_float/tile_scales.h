// The scales of FP8 weights as kernels read them: a factor for each output, and one for each tile of 64 × 64 and half of its
// row tiles, since outputs of two weights may take turns in a tile (kernels/frame/linear_fusion.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/packed.h"

namespace w4q::kernels {

struct FloatScales {
  std::vector<float> outputs;     ///< [n]; empty: all are 1
  std::vector<float> tile_pairs;  ///< FP8: [ceil(n/64)][ceil(k/64)][2], of rows g and g + 8 of every row tile
  float largest = 1;              ///< what DevicePass::scale_max may be: of tile_pairs, or of block scales
};

/// Those of canonical small floats whose rows stand below one another, or `rows_in_turn` rows of each in turn. Of scales for
/// 128 × 128 weights the sizes of all but the last are multiples of 64.
FloatScales float_scales(std::span<const formats::PackedWeight* const> weights, int64_t rows_in_turn);

}  // namespace w4q::kernels
