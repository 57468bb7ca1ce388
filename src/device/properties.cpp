#include "device/properties.h"

#include <cuda_runtime.h>

#include <cstdlib>

#include "core/text.h"

namespace w4q::device {
namespace {

constexpr int oldest_sm = 80;

/// Before the first question: streams have queues of their own, 32 instead of 8, as long as the user does not say otherwise.
/// Those that share one wait for each other.
void ask_for_queues() noexcept {
  [[maybe_unused]] static const int asked = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

/// Why GPU `ordinal` of `count` cannot be had, if the runtime's questions ended with `status`; empty: it can.
std::string refusal(cudaError_t status, int count, int ordinal) {
  if (status == cudaSuccess && ordinal < count) return {};
  cudaGetLastError();  // the failed question must not be reported by a later launch
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver on this machine";
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (count == 0) return "no CUDA device";
  return concat("there is no cuda:", ordinal, ", the last one is cuda:", count - 1);
}

}  // namespace

int gpu_count() noexcept {
  ask_for_queues();
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // the failed question must not be reported by a later launch
  return 0;
}

std::optional<Properties> find_gpu(std::string* why, int ordinal) {
  ask_for_queues();
  int count = 0;
  cudaDeviceProp found{};
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && ordinal < count) status = cudaGetDeviceProperties(&found, ordinal);
  std::string reason = refusal(status, count, ordinal);
  const int sm = 10 * found.major + found.minor;
  if (reason.empty() && sm < oldest_sm) reason = std::string(found.name) + " is older than compute capability 8.0";
  if (!reason.empty()) {
    if (why != nullptr) *why = reason;
    return std::nullopt;
  }
  return Properties{.name = found.name,
                    .sm = sm,
                    .multiprocessors = found.multiProcessorCount,
                    .memory_bytes = static_cast<int64_t>(found.totalGlobalMem),
                    .l2_bytes = found.l2CacheSize,
                    .shared_bytes_per_block_optin = static_cast<int64_t>(found.sharedMemPerBlockOptin),
                    .shared_bytes_per_multiprocessor = static_cast<int64_t>(found.sharedMemPerMultiprocessor)};
}

}  // namespace w4q::device
