// How the attention of one token is cut for a GPU.
#pragma once

#include <algorithm>

#include "device/properties.h"

namespace w4q::kernels::decode {

inline constexpr int tile_heads = 8;  ///< query heads of a block: the columns of an mma
inline constexpr int most_splits = 64;

struct Plan {
  int head_tiles, splits;
};

/// One block a multiprocessor: a page ahead in registers is worth more than more warps.
inline Plan plan_for(const device::Properties& gpu, int heads, int kv_heads) {
  const int group = heads / kv_heads;
  const int head_tiles = (group + tile_heads - 1) / tile_heads;
  return {head_tiles, std::clamp(gpu.multiprocessors / (kv_heads * head_tiles), 1, most_splits)};
}

}  // namespace w4q::kernels::decode
