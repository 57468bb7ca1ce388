// How products are cut for a GPU: plain functions of what it is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/properties.h"

namespace w4q::kernels {

/// Shared memory that a block may have: on every GPU from sm_80 on, and on those with large blocks (sm_80, sm_90).
inline constexpr int least_shared_bytes = 99 * 1024;
inline constexpr int large_shared_bytes = 163 * 1024;

inline bool has_large_blocks(const device::Properties& gpu) {
  return gpu.shared_bytes_per_block_optin >= large_shared_bytes;
}

/// One block a multiprocessor, and no block without a tile for each of a few warps.
inline int blocks_for(const device::Properties& gpu, int64_t tiles) {
  return static_cast<int>(std::clamp<int64_t>(tiles / 4, 1, gpu.multiprocessors));
}

}  // namespace w4q::kernels
