#include <algorithm>

#include "core/text.h"
#include "device/check.h"
#include "device/cusolver.h"
#include "device/element_grid.h"
#include "quantize/error_factor_cuda.h"

namespace w4q::quantize {
namespace {

using device::element_blocks;
using device::element_threads;

/// The matrix with its order reversed, relative to its mean diagonal, damped: the lower factor of it is the upper
/// factor of the matrix, reversed.
__global__ void __launch_bounds__(element_threads) reverse_kernel(const float* gram, const int32_t* columns, int64_t k,
                                                                  double mean, double damping, double* reversed) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= k * k) return;
  const int64_t i = at / k, j = at % k;
  const double value = static_cast<double>(gram[int64_t{columns[k - 1 - i]} * k + columns[k - 1 - j]]) / mean;
  reversed[at] = i == j ? value + damping : value;
}

__global__ void __launch_bounds__(element_threads)
    take_factors_kernel(const double* reversed, int64_t k, float* pivots, float* coupling, int* lost) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= k * k) return;
  const int64_t j = at / k, i = at % k;
  const double root = reversed[(k - 1 - j) * k + k - 1 - j];
  coupling[at] = i < j ? static_cast<float>(reversed[(k - 1 - i) * k + k - 1 - j] / root) : 0.0f;
  if (i != j) return;
  pivots[j] = static_cast<float>(root * root);
  if (!(root * root > least_pivot)) *lost = 1;
}

}  // namespace

ErrorFactorCuda::ErrorFactorCuda(CudaWork& work, const GramCuda& gram, int64_t block, double damping,
                                 std::string_view name)
    : block_(block), damping_(damping) {
  check_damping(damping, block, name);
  const auto diagonal = gram.diagonal();
  const double mean = mean_diagonal(diagonal, name);
  order_ = column_order(diagonal, block);
  const auto k = static_cast<size_t>(width());
  columns_ = device::DeviceBuffer::copy_of(bytes_of(order_.columns), work.stream);
  pivots_ = device::DeviceBuffer(work.stream, k * sizeof(float));
  coupling_ = device::DeviceBuffer(work.stream, k * k * sizeof(float));
  work.stream.synchronize();
  if (!device::have_cusolver()) {
    factor_on_cpu(work, gram, name);
    return;
  }
  while (!factor(work, gram, mean)) damping_ = raised_damping(damping_, name);
}

void ErrorFactorCuda::factor_on_cpu(CudaWork& work, const GramCuda& gram, std::string_view name) {
  const auto matrix = gram.download();
  const ErrorFactor factor({matrix.data(), width(), width()}, block_, damping_, name);
  damping_ = factor.damping();
  pivots_.upload(std::as_bytes(factor.pivots()), work.stream);
  const auto values = std::span(factor.coupling().data, static_cast<size_t>(width() * width()));
  coupling_.upload(std::as_bytes(values), work.stream);
  work.stream.synchronize();
}

bool ErrorFactorCuda::factor(CudaWork& work, const GramCuda& gram, double mean) {
  const int64_t k = width();
  device::DeviceBuffer reversed(work.stream, static_cast<size_t>(k * k) * sizeof(double));
  const device::Stream& stream = work.stream;
  reverse_kernel<<<element_blocks(k * k), element_threads, 0, stream.get()>>>(gram.data(), columns_.as<int32_t>(), k,
                                                                              mean, damping_, reversed.as<double>());
  device::check_launch("reversed Gram matrix", concat(k));
  if (!device::cholesky(reversed.as<double>(), k, work.stream)) return false;
  const int none = 0;
  int* const lost = work.put(work.sums, &none, 1);
  take_factors_kernel<<<element_blocks(k * k), element_threads, 0, stream.get()>>>(
      reversed.as<double>(), k, pivots_.as<float>(), coupling_.as<float>(), lost);
  device::check_launch("factors", concat(k));
  return work.fetch(lost, 1).front() == 0;
}

}  // namespace w4q::quantize
