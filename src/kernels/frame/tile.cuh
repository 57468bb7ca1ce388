// What every kernel on tiles of 64 outputs × 64 inputs knows: the tile, who takes which tiles, and a lane's
// activations.
#pragma once

#include "device/fragment.cuh"
#include "repack/layout_kbit_fragment.h"

namespace w4q::kernels::frame {

using Map = repack::KbitFragmentMap;

/// A stream-K partition: `total` tiles in contiguous runs, one for each of `parts`, that differ by at most one tile.
struct Partition {
  int quotient = 0, remainder = 0;
  Partition() = default;
  __host__ __device__ Partition(int total, int parts) : quotient(total / parts), remainder(total % parts) {}
  __device__ int begin(int part) const { return part * quotient + min(part, remainder); }
  /// The part that holds tile `at`.
  __device__ int holder(int at) const {
    const int longer = remainder * (quotient + 1);
    return at < longer ? at / (quotient + 1) : remainder + (at - longer) / quotient;
  }
};

/// The number of this warp in its block: by a shuffle, so that the compiler knows it to be the same for all lanes.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0); }

/// Eight values that start at `from`, of which `left` exist; one at a time, for rows that are not aligned to 16 bytes
/// and where k ends within a tile.
template <class Scalar>
__device__ inline uint4 load_ragged(const Scalar* from, int left) {
  const auto* values = reinterpret_cast<const unsigned short*>(from);
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = 2 * j < left ? values[2 * j] : 0;
    const uint32_t high = 2 * j + 1 < left ? values[2 * j + 1] : 0;
    words[j] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// The two B registers of the first or second mma step of a block, from a lane's 8 activations of that block.
__device__ __forceinline__ uint2 block_step(const uint4& x, int step) {
  return step % 2 == 0 ? make_uint2(x.x, x.y) : make_uint2(x.z, x.w);
}

}  // namespace w4q::kernels::frame
