// Thread blocks of a cluster, which see each other's shared memory (sm_90 and newer). Older GPUs have no such launches:
// the code compiles for them and does nothing of use.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// Of a kernel: clusters of so many thread blocks, of which the grid is a multiple.
#define W4Q_CLUSTER(blocks) __cluster_dims__(blocks)
#else
#define W4Q_CLUSTER(blocks)
#endif

namespace w4q::device {

/// The number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<int>(__clusterRelativeBlockRank());
#else
  return 0;
#endif
}

/// Waits for all threads of the cluster; what they wrote is seen.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
#endif
}

/// Where block `rank` has what this one has at `shared`.
template <class T>
__device__ __forceinline__ T* of_cluster_block(T* shared, [[maybe_unused]] int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<T*>(__cluster_map_shared_rank(shared, static_cast<unsigned>(rank)));
#else
  return shared;
#endif
}

}  // namespace w4q::device
