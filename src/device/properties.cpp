#include "device/properties.h"

#include <cuda_runtime.h>

namespace w4q::device {

std::optional<Properties> find_gpu(std::string* why) {
  int count = 0;
  int current = 0;
  cudaDeviceProp properties{};
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) status = cudaGetDevice(&current);
  if (status == cudaSuccess && count > 0) status = cudaGetDeviceProperties(&properties, current);
  if (status != cudaSuccess || count == 0) {
    int driver = 0;
    const bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    const char* reason = status == cudaSuccess ? "no CUDA device" : cudaGetErrorString(status);
    if (why != nullptr) *why = no_driver ? "no NVIDIA driver on this machine" : reason;
    cudaGetLastError();  // the failed question must not be reported by a later launch
    return std::nullopt;
  }
  constexpr int oldest_sm = 80;
  const int sm = 10 * properties.major + properties.minor;
  if (sm < oldest_sm) {
    if (why != nullptr) *why = std::string(properties.name) + " is older than compute capability 8.0";
    return std::nullopt;
  }
  return Properties{properties.name,
                    sm,
                    properties.multiProcessorCount,
                    static_cast<int64_t>(properties.totalGlobalMem),
                    properties.l2CacheSize,
                    static_cast<int64_t>(properties.sharedMemPerBlockOptin)};
}

}  // namespace w4q::device
