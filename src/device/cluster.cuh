// Thread blocks of a cluster, which see each other's shared memory (sm_90 and newer). Older GPUs have no such launches:
// the code compiles for them and does nothing of use.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// Of a kernel: clusters of so many thread blocks, of which the grid is a multiple.
#define W4Q_CLUSTER(blocks) __cluster_dims__(blocks)
#else
#define W4Q_CLUSTER(blocks)
#endif

namespace w4q::device {

/// The number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

/// Waits for all threads of the cluster; what they wrote is seen.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/// Where block `rank` has what this one has at `shared`.
template <class T>
__device__ __forceinline__ T* of_cluster_block(T* shared, int rank) {
  T* result = shared;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(shared), "r"(rank));
#endif
  return result;
}

}  // namespace w4q::device
