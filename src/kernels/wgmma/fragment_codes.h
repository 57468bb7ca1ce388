// Codes of kbit-fragment as boxes that the copy engine brings, of kbit and of rotated weights.
#pragma once

#include "kernels/wgmma/map.h"

namespace w4q::kernels::wgmma {

/// [N-tile][tile][2][half a tile's words]: a box is one tile of Weights::n_tiles N-tiles.
template <class Weights>
CUtensorMap map_fragment_codes(const void* codes, int64_t tiles, int64_t n_tiles) {
  constexpr int half = Weights::code_bytes / 2;
  return map_boxes(
      codes, CU_TENSOR_MAP_DATA_TYPE_UINT64,
      {{half / 8, 0, half / 8}, {2, half, 2}, {tiles, 2 * half, 1}, {n_tiles, tiles * 2 * half, Weights::n_tiles}});
}

}  // namespace w4q::kernels::wgmma
