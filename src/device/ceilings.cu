#include <algorithm>
#include <vector>

#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/check.h"
#include "device/properties.h"
#include "device/timing.h"

namespace w4q::device {
namespace {

constexpr int threads = 512;

/// Sums all 16-byte words with four loads in flight per thread; the sum is stored where it can never be seen to be
/// unused.
__global__ void __launch_bounds__(threads) read_all(const uint4* data, int64_t count, unsigned* sink) {
  unsigned sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
  }
  for (; i < count; i += stride) {
    const uint4 word = __ldcs(data + i);
    sum += word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x9E3779B9u) *sink = sum;
}

__global__ void __launch_bounds__(threads) write_all(uint4* data, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    __stcs(data + i, make_uint4(static_cast<unsigned>(i), 1, 2, 3));
  }
}

/// Random-looking bytes: zeros would let the memory system go faster than it does.
__global__ void fill_random(uint4* data, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + 12345u;
    const auto next = [&x] { return x = (x ^ (x >> 15)) * 2246822519u + 1; };
    data[i] = make_uint4(next(), next(), next(), next());
  }
}

int grid_size() { return 4 * find_gpu()->multiprocessors; }

DeviceBuffer random_buffer(int64_t bytes) {
  DeviceBuffer buffer(static_cast<size_t>(bytes));
  fill_random<<<grid_size(), threads>>>(buffer.as<uint4>(), bytes / 16);
  check_launch("fill_random", "ceilings");
  return buffer;
}

}  // namespace

double read_floor_seconds(int64_t bytes) {
  const int copies = rotating_copies(bytes);
  const int64_t stride = (bytes + 255) / 256 * 256;
  const DeviceBuffer data = random_buffer(stride * copies);
  DeviceBuffer sink(256);
  const int grid = grid_size();
  const auto timing = time_calls(
      [&](int call, cudaStream_t stream) {
        const auto* from = reinterpret_cast<const uint4*>(data.data() + (call % copies) * stride);
        read_all<<<grid, threads, 0, stream>>>(from, bytes / 16, sink.as<unsigned>());
      },
      {std::max(20, copies), 15});
  return timing.median;
}

Ceilings measure_ceilings(int64_t bytes) {
  const DeviceBuffer from = random_buffer(bytes);
  DeviceBuffer to(static_cast<size_t>(bytes));
  const int grid = grid_size();
  const auto rate = [&](double factor, const std::function<void(int, cudaStream_t)>& call) {
    return factor * static_cast<double>(bytes) / time_calls(call, {4, 9}).median;
  };
  Ceilings result;
  result.read = static_cast<double>(bytes) / read_floor_seconds(bytes);
  result.write =
      rate(1, [&](int, cudaStream_t stream) { write_all<<<grid, threads, 0, stream>>>(to.as<uint4>(), bytes / 16); });
  result.copy = rate(2, [&](int, cudaStream_t stream) {
    check(cudaMemcpyAsync(to.data(), from.data(), to.size(), cudaMemcpyDeviceToDevice, stream), "copying on the GPU");
  });
  return result;
}

}  // namespace w4q::device
