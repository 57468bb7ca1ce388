// float-fragment: small floats in the order in which their kernels read them. Codes of 4 and of 8 bits stand as in
// kbit-fragment (layout_kbit_fragment.h): a pair of codes of 8 bits is half a word, two words of a lane are an mma step.
// Scales of blocks of 32 stand as there, too. A lane's columns of a block of 32 are eight neighbours, so that it has one of
// the two blocks of 16 in it: their scales are twice as many,
//
//   scale = tile · 256 + 32·g + 16·(col mod 32 div 16) + 8·block + 2·row_tile + half,   block = col mod 64 div 32
//
// and a lane's sixteen are 16 neighbouring bytes. Scales of rows, tensors and 128 × 128 weights stand as they are in the
// canonical layout. n and k are zero-padded to 64 (docs/layouts.md).
#pragma once

#include "repack/layout_kbit_fragment.h"

namespace w4q::repack {

struct FloatFragmentMap : KbitFragmentMap {
  using KbitFragmentMap::KbitFragmentMap;
  /// Scales of a tile, of blocks of 16 or 32.
  W4Q_HOST_DEVICE static constexpr int64_t scales_of_tile(int block) { return tile_rows * tile_cols / block; }
  /// Where the scale of a block stands that weight (row, col) is in.
  W4Q_HOST_DEVICE constexpr int64_t block_scale(int block, int64_t row, int64_t col) const {
    if (block == 32) return scale(row, col);
    const Place at = place(row, col);
    return tile(row, col) * scales_of_tile(block) + 32 * (at.lane / 4) + 16 * (col % 32 / 16) + 8 * (at.pair / 8) +
           2 * at.row_tile + at.half;
  }
};

namespace detail {

/// Every scale of a tile has 16 weights, and a lane's sixteen are neighbours.
constexpr bool float_scales_are_places() {
  const FloatFragmentMap map(64, 64);
  int uses[256] = {};
  for (int64_t row = 0; row < 64; ++row) {
    for (int64_t col = 0; col < 64; col += 4) {
      const int64_t at = map.block_scale(16, row, col);
      ++uses[at];
      if (at / 16 != FloatFragmentMap::place(row, col).lane / 2) return false;
      if (at != map.block_scale(16, row, col / 16 * 16) || at != map.block_scale(16, row, col + 3)) return false;
    }
  }
  for (const int count : uses) {
    if (count != 4) return false;
  }
  return true;
}
static_assert(float_scales_are_places());

}  // namespace detail
}  // namespace w4q::repack
