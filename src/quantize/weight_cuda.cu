#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "kernels/common/block_reduce.cuh"
#include "quantize/integer_round.cuh"
#include "quantize/source_matrix.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

using device::element_blocks;
using device::element_threads;
constexpr int warp = 32;
/// The bits of the largest finite float; positive floats order as integers.
constexpr int largest_float = 0x7F7FFFFF;

template <class T>
__global__ void __launch_bounds__(element_threads)
    widen_kernel(const T* values, int64_t count, float* out, int* not_finite) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= count) return;
  const float value = cuda::widen(values[at]);
  out[at] = value;
  if (!(fabsf(value) < INFINITY)) *not_finite = 1;
}

__global__ void __launch_bounds__(element_threads)
    multiply_kernel(float* weight, int64_t count, int64_t k, const float* scales) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) weight[at] *= scales[at % k];
}

__global__ void __launch_bounds__(element_threads)
    divide_kernel(float* weight, int64_t count, int64_t k, const float* scales) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) weight[at] /= scales[at / k];
}

__global__ void __launch_bounds__(element_threads)
    divide_columns_kernel(float* weight, int64_t count, int64_t k, const float* scales) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) weight[at] /= scales[at % k];
}

__global__ void __launch_bounds__(element_threads)
    extremes_kernel(const float* weight, int64_t n, int64_t k, int64_t row_blocks, int* extremes) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (index >= n * row_blocks) return;
  const int64_t c = index % row_blocks * warp + threadIdx.x % warp;
  const float absmax = kernels::warp_max(c < k ? fabsf(weight[index / row_blocks * k + c]) : 0.0f);
  if (threadIdx.x % warp != 0 || absmax == 0) return;
  atomicMin(extremes, __float_as_int(absmax));
  atomicMax(extremes + 1, __float_as_int(absmax));
}

[[noreturn]] void refuse(const TensorView& weight) {
  std::vector<float> values(static_cast<size_t>(weight.shape[1]));
  for (int64_t row = 0; row < weight.shape[0]; ++row) {
    w4q::widen(row_bytes(weight, row), weight.dtype, values);
    if (std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) continue;
    refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
  }
  throw Error(ErrorCode::internal, "a weight that is not finite cannot be found");
}

}  // namespace

device::DeviceBuffer upload_weight(CudaWork& work, const TensorView& weight) {
  check_weight(weight);
  return upload_rows(work, weight, 0, weight.shape[0]);
}

device::DeviceBuffer upload_rows(CudaWork& work, const TensorView& weight, int64_t first, int64_t rows) {
  const int64_t count = rows * weight.shape[1];
  device::DeviceBuffer result(work.stream, static_cast<size_t>(count) * sizeof(float));
  const device::Stream& stream = work.stream;
  const auto row_size = static_cast<int64_t>(row_bytes(weight, 0).size());
  const std::byte* const stored = work.put(work.errors, weight.bytes.data() + first * row_size, rows * row_size);
  const int none = 0;
  int* const not_finite = work.put(work.sums, &none, 1);
  if (weight.dtype == DType::f32) {
    widen_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(reinterpret_cast<const float*>(stored),
                                                                              count, result.as<float>(), not_finite);
  } else if (weight.dtype == DType::f16) {
    widen_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(reinterpret_cast<const __half*>(stored),
                                                                              count, result.as<float>(), not_finite);
  } else {
    widen_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(
        reinterpret_cast<const __nv_bfloat16*>(stored), count, result.as<float>(), not_finite);
  }
  device::check_launch("weights", concat(rows, " × ", weight.shape[1]));
  if (work.fetch(not_finite, 1).front() != 0) refuse(weight);
  return result;
}

void multiply_columns_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales) {
  multiply_kernel<<<element_blocks(n * k), element_threads, 0, work.stream.get()>>>(weight, n * k, k, scales);
  device::check_launch("scaled columns", concat(n, " × ", k));
}

void divide_columns_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales) {
  divide_columns_kernel<<<element_blocks(n * k), element_threads, 0, work.stream.get()>>>(weight, n * k, k, scales);
  device::check_launch("scaled columns", concat(n, " × ", k));
}

void divide_rows_cuda(CudaWork& work, float* weight, int64_t n, int64_t k, const float* scales) {
  divide_kernel<<<element_blocks(n * k), element_threads, 0, work.stream.get()>>>(weight, n * k, k, scales);
  device::check_launch("scaled rows", concat(n, " × ", k));
}

BlockExtremes block_extremes_cuda(CudaWork& work, const float* weight, int64_t n, int64_t k) {
  const int64_t row_blocks = (k + warp - 1) / warp;
  const int none[] = {largest_float, 0};
  int* const extremes = work.put(work.sums, none, 2);
  extremes_kernel<<<element_blocks(n * row_blocks * warp), element_threads, 0, work.stream.get()>>>(
      weight, n, k, row_blocks, extremes);
  device::check_launch("block maxima", concat(n, " × ", k));
  const auto found = work.fetch(extremes, 2);
  if (found[1] == 0) return {};
  return {std::bit_cast<float>(found[0]), std::bit_cast<float>(found[1])};
}

}  // namespace w4q::quantize
