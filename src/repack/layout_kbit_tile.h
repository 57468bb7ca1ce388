// kbit-tile: bitsandbytes' tiled order of kbit blocks. The matrix is cut into tiles of 128 outputs × 64 inputs (two
// blocks of 32 inputs side by side); tiles stand outputs-first, and within a tile the two blocks of an output are
// neighbours. n is zero-padded to 128, k to 64 (docs/layouts.md).
//
//   tile(row, block)  = (block div 2) · ceil(n/128) + row div 128
//   slot(row, block)  = tile · 256 + 2 · (row mod 128) + block mod 2
//   word(slot, plane) = slot · bits + plane, bit in word = column mod 32; scale index = slot
//
// so that codes are I32 [ceil(k/64), ceil(n/128), 128, 2, bits] and scales [ceil(k/64), ceil(n/128), 128, 2].
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::repack {

struct KbitTileMap {
  static constexpr int64_t tile_rows = 128;
  static constexpr int64_t tile_blocks = 2;
  static constexpr int64_t tile_slots = tile_rows * tile_blocks;
  static constexpr int64_t block = 32;

  int64_t row_tiles = 0;    ///< ceil(n / 128)
  int64_t block_tiles = 0;  ///< ceil(k / 64)

  W4Q_HOST_DEVICE constexpr KbitTileMap(int64_t n, int64_t k)
      : row_tiles((n + tile_rows - 1) / tile_rows),
        block_tiles((k + tile_blocks * block - 1) / (tile_blocks * block)) {}

  /// Rows and blocks with padding.
  W4Q_HOST_DEVICE constexpr int64_t rows() const { return row_tiles * tile_rows; }
  W4Q_HOST_DEVICE constexpr int64_t blocks() const { return block_tiles * tile_blocks; }
  /// Where block `block_index` of row `row` stands, counted in blocks.
  W4Q_HOST_DEVICE constexpr int64_t slot(int64_t row, int64_t block_index) const {
    const int64_t tile = block_index / tile_blocks * row_tiles + row / tile_rows;
    return tile * tile_slots + row % tile_rows * tile_blocks + block_index % tile_blocks;
  }
};

namespace detail {

/// Every slot of a padded matrix is taken exactly once.
constexpr bool is_bijection(int64_t n, int64_t k) {
  constexpr int64_t capacity = 4 * KbitTileMap::tile_slots;
  const KbitTileMap map(n, k);
  bool taken[capacity] = {};
  for (int64_t row = 0; row < map.rows(); ++row) {
    for (int64_t block = 0; block < map.blocks(); ++block) {
      const int64_t slot = map.slot(row, block);
      if (slot < 0 || slot >= map.rows() * map.blocks() || taken[slot]) return false;
      taken[slot] = true;
    }
  }
  return true;
}

static_assert(is_bijection(128, 64), "one tile");
static_assert(is_bijection(129, 65), "four tiles, three of them padded");

}  // namespace detail
}  // namespace w4q::repack
