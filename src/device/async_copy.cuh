// Copies from global to shared memory that a thread starts and waits for later (sm_80 and newer).
#pragma once

#include <cstdint>

namespace w4q::device {

/// Starts copying 16 bytes, both sides aligned to 16, past the L1 cache.
__device__ __forceinline__ void copy_async(char* shared, const void* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}
/// The same of 4 or 8 bytes, aligned to as many; by way of the L1 cache.
template <int bytes>
__device__ __forceinline__ void copy_few_async(char* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8);
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "n"(bytes)
      : "memory");
}
/// Closes a group of the copies that this thread has started.
__device__ __forceinline__ void close_async_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but the last `left` groups of this thread have landed.
template <int left>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

}  // namespace w4q::device
