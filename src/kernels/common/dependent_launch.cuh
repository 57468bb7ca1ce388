// Launches that may begin while the launch before them in the stream still runs (programmatic dependent launch, sm_90).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string_view>

#include "device/launch.h"

namespace w4q::kernels {

/// True where the code that runs on this GPU was compiled with the waits that overlapping needs.
template <auto kernel>
bool supports_dependent_launch() {
  static const bool answer = [] {
    cudaFuncAttributes attributes{};
    device::check(cudaFuncGetAttributes(&attributes, kernel), "asking about a kernel");
    return attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
  }();
  return answer;
}

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  /// The kernel waits (device::wait_grid_dependency) before it touches what earlier launches write.
  bool overlap = false;
};

/// Launches `kernel`, of which more than 48 KB of shared memory have been allowed where it needs them.
template <auto kernel, class... Args>
void launch(const LaunchShape& shape, cudaStream_t stream, std::string_view name, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.overlap && supports_dependent_launch<kernel>() ? 1 : 0;
  device::check(cudaLaunchKernelEx(&config, kernel, args...), name);
}

/// Shared memory that a block may have: on every GPU from sm_80 on, and on those with large blocks (sm_80, sm_90).
constexpr int least_shared_bytes = 99 * 1024;
constexpr int large_shared_bytes = 163 * 1024;

/// Lets a kernel use `bytes` of shared memory; once per kernel and program.
template <auto kernel, int bytes, int most_bytes = least_shared_bytes>
void allow_shared_memory() {
  static_assert(bytes <= most_bytes, "more shared memory than a block of the GPU has");
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  device::check(allowed, "asking for shared memory");
}

/// Asks for no more shared memory on a multiprocessor than one block of `kernel` needs, so that two do not fit. Between
/// launches that overlap, other kernels empty some multiprocessors before others: where two blocks fit, the next
/// launch's would gather there, and take twice as long as those that stand alone.
template <auto kernel, int bytes>
void keep_blocks_apart() {
  static const cudaError_t asked = [] {
    constexpr int reserved = 1024;
    const int all = device::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int percent = std::min((100 * (bytes + reserved) + all - 1) / all, 100);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
  }();
  device::check(asked, "dividing a multiprocessor's memory");
}

}  // namespace w4q::kernels
