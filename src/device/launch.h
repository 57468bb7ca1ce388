// Launches, and how many thread blocks of a kernel a GPU holds at once: the grid of kernels that loop over their work.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "device/check.h"
#include "device/stream.h"

namespace w4q::device {

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  /// Begins while the launch before is still running, where the GPU can: the kernel waits
  /// (wait_grid_dependency) before it touches what earlier launches write.
  bool overlap = false;
  bool keep_apart = false;  ///< KernelNeeds
};

/// Launches `kernel` with pointers to its parameters on the stream's GPU, set up there as the shape needs it.
void launch(const void* kernel, const LaunchShape& shape, void** parameters, const Stream& stream,
            std::string_view name);

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
