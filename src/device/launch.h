// How large the GPU is, and how many thread blocks of a kernel it holds at once: the grid of kernels that loop over
// their work.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/check.h"
#include "device/context.h"

namespace w4q::device {

/// What the runtime says about the current GPU.
inline int attribute(cudaDeviceAttr of) {
  int current = 0;
  int value = 0;
  check(cudaGetDevice(&current), "asking for the current GPU");
  check(cudaDeviceGetAttribute(&value, of, current), "asking about the current GPU");
  return value;
}

inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

/// Blocks of `threads` threads that are resident together, and not more than `wanted`; at least 1.
template <class Kernel>
int resident_blocks(const Context& context, Kernel kernel, int threads, int64_t wanted) {
  const Scope here(context);
  int each = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0), "asking for the occupancy");
  return static_cast<int>(
      std::clamp<int64_t>(wanted, 1, int64_t{std::max(each, 1)} * context.properties().multiprocessors));
}

}  // namespace w4q::device
