// Products of 16-bit weights by cuBLAS: what the kernels for packed ones are measured against.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "device/copy.h"
#include "device/cublas.h"
#include "device/timing.h"
#include "gpu_weights.h"

namespace w4q::bench {

/// Enough calls in a graph that each copy of the weights is used twice.
inline device::TimingOptions timing_of(int copies) { return {std::max(20, 2 * copies), 15}; }

/// Seconds of one product of random f16 values for each number of activation rows; cold caches.
inline std::map<int64_t, double> time_cublas(int64_t n, int64_t k, std::span<const int64_t> rows,
                                             const device::Stream& stream) {
  const int copies = std::max(2, device::rotating_copies(stream.context().properties(), n * k * 2));
  const auto values = random_halves(size_t{1} << 22, 3);
  std::vector<device::DeviceBuffer> weights;
  for (int copy = 0; copy < copies; ++copy) {
    auto& weight = weights.emplace_back(stream.context(), static_cast<size_t>(n * k * 2));
    for (size_t at = 0; at < weight.size(); at += values.size() * 2) {
      const size_t size = std::min(values.size() * 2, weight.size() - at);
      device::copy(device::Way::to_gpu, weight.data() + at, values.data(), size, stream, "copying weights");
    }
  }
  const int64_t most_rows = std::ranges::max(rows);
  const auto activations = random_halves(static_cast<size_t>(most_rows * k), 5);
  const auto x = device::DeviceBuffer::copy_of(std::as_bytes(std::span(activations)), stream);
  device::DeviceBuffer y(stream.context(), static_cast<size_t>(most_rows * n * 2)),
      workspace(stream.context(), device::cublas_workspace_bytes);
  std::map<int64_t, double> seconds;
  for (const int64_t m : rows) {
    const auto call = [&](int index, const device::Stream& on) {
      const void* const weight = weights[static_cast<size_t>(index % copies)].data();
      device::cublas_multiply({m, n, k, DType::f16, x.data(), k, weight, k, y.data(), n, workspace.data()}, on);
    };
    call(0, stream);  // cuBLAS cannot be started within a capture
    stream.synchronize();
    seconds[m] = device::time_calls(stream.context(), call, timing_of(copies)).median;
  }
  return seconds;
}

}  // namespace w4q::bench
