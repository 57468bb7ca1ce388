// ldmatrix: four 8 × 8 matrices of 16-bit values out of shared memory, in the order in which mma's operands have them.
#pragma once

#include <cstdint>

namespace w4q::device {

/// Row r of matrix i, 16 bytes, is where lane 8·i + r says; lane 4·r + c gets pair c of row r of each matrix.
__device__ __forceinline__ uint4 load_matrices(const void* at) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at)))
               : "memory");
  return x;
}
/// The same, each matrix turned over its diagonal.
__device__ __forceinline__ uint4 load_matrices_transposed(const void* at) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at)))
               : "memory");
  return x;
}

}  // namespace w4q::device
