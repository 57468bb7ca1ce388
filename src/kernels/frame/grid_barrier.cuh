// A barrier of the blocks of one launch: a word in global memory, zero between launches, counts arrivals in its lower
// half and blocks that ask no more in its upper half.
#pragma once

#include <cstdint>

namespace w4q::kernels::frame {

/// What the block has to give is in memory: by one thread, behind a barrier of those that stored it.
__device__ __forceinline__ void arrive(uint32_t* barrier) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(barrier) : "memory");
}

/// Until all blocks have arrived; false where that takes too long. By one thread.
__device__ __forceinline__ bool wait_for_arrivals(const uint32_t* barrier) {
  constexpr long long patience = 1 << 18;  // clocks, some 0.15 ms
  const long long begin = clock64();
  while (true) {
    uint32_t word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(barrier) : "memory");
    if ((word & 0xFFFF) == gridDim.x) return true;
    if (clock64() - begin > patience) return false;
  }
}

/// This block asks no more. The upper half of the word counts such blocks; the last one finds all but itself, and
/// empties it.
__device__ __forceinline__ uint32_t leave(uint32_t* barrier) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 65536;" : "=r"(before) : "l"(barrier) : "memory");
  return before;
}
__device__ __forceinline__ void empty_if_last(uint32_t* barrier, uint32_t before) {
  if (before == (gridDim.x | (gridDim.x - 1) << 16)) *barrier = 0;
}

}  // namespace w4q::kernels::frame
