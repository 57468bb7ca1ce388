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

/// Of at most `most` blocks, which share `units` evenly and have `parts` runs of them side by side, the fewest whose longest
/// run is no longer. Nobody waits for longer, fewer blocks have to bring sums together, and multiprocessors that are left
/// take blocks of the launch behind, which ask for their weights meanwhile.
inline int fewest_blocks(int64_t units, int parts, int most) {
  const int64_t at_once = int64_t{most} * parts, longest = (units + at_once - 1) / at_once;
  return static_cast<int>((units + longest * parts - 1) / (longest * parts));
}

}  // namespace w4q::kernels
