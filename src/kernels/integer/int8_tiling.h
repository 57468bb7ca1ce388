// How a layer with int8 activations is cut into tiles for a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/properties.h"
#include "kernels/integer/int8_order.h"

namespace w4q::kernels::int8 {

inline constexpr int tile_outputs = 256;
inline constexpr int tile_rows = static_cast<int>(Int8Order::tile_rows);
/// 128 inputs each, that a block along k has at least: below, adding up costs more than it brings.
inline constexpr int64_t least_split_chunks = 4;
/// … and so many blocks at most: one of them reads the sums of all, 64 KB each for every 64 rows.
constexpr int64_t most_splits(int64_t m) { return m <= tile_rows / 2 ? 8 : 4; }

struct Tiling {
  int64_t rows, outputs;  ///< tiles
  int splits;             ///< blocks to a tile
  int64_t count() const { return rows * outputs; }
};

inline Tiling tiling_of(const device::Properties& gpu, int64_t m, int64_t n, int64_t k) {
  Tiling tiling{(m + tile_rows - 1) / tile_rows, (n + tile_outputs - 1) / tile_outputs, 1};
  const int64_t splits = std::min(gpu.multiprocessors / tiling.count(), Int8Order(m, k).chunks / least_split_chunks);
  tiling.splits = static_cast<int>(std::clamp<int64_t>(splits, 1, most_splits(m)));
  return tiling;
}

}  // namespace w4q::kernels::int8
