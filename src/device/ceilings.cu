#include <algorithm>
#include <vector>

#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/check.h"
#include "device/copy.h"
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

int grid_size(const Context& context) { return 4 * context.properties().multiprocessors; }

DeviceBuffer random_buffer(Context& context, int64_t bytes) {
  DeviceBuffer buffer(context, static_cast<size_t>(bytes));
  const Stream stream(context);
  fill_random<<<grid_size(context), threads, 0, stream.get()>>>(buffer.as<uint4>(), bytes / 16);
  check_launch("fill_random", "ceilings");
  stream.synchronize();
  return buffer;
}

}  // namespace

double read_floor_seconds(Context& context, int64_t bytes) {
  const int copies = rotating_copies(context.properties(), bytes);
  const int64_t stride = (bytes + 255) / 256 * 256;
  const DeviceBuffer data = random_buffer(context, stride * copies);
  DeviceBuffer sink(context, 256);
  const int grid = grid_size(context);
  const auto timing = time_calls(context,
                                 [&](int call, const Stream& stream) {
                                   const auto* from =
                                       reinterpret_cast<const uint4*>(data.data() + (call % copies) * stride);
                                   read_all<<<grid, threads, 0, stream.get()>>>(from, bytes / 16, sink.as<unsigned>());
                                 },
                                 {std::max(20, copies), 15});
  return timing.median;
}

Ceilings measure_ceilings(Context& context, int64_t bytes) {
  const DeviceBuffer from = random_buffer(context, bytes);
  DeviceBuffer to(context, static_cast<size_t>(bytes));
  const int grid = grid_size(context);
  const auto rate = [&](double factor, const std::function<void(int, const Stream&)>& call) {
    return factor * static_cast<double>(bytes) / time_calls(context, call, {4, 9}).median;
  };
  Ceilings result;
  result.read = static_cast<double>(bytes) / read_floor_seconds(context, bytes);
  result.write = rate(
      1, [&](int, const Stream& stream) { write_all<<<grid, threads, 0, stream.get()>>>(to.as<uint4>(), bytes / 16); });
  result.copy = rate(2, [&](int, const Stream& stream) {
    copy(Way::on_gpu, to.data(), from.data(), to.size(), stream, "copying on the GPU");
  });
  return result;
}

}  // namespace w4q::device
