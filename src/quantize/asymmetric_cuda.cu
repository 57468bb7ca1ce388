#include "quantize/asymmetric_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "kernels/common/block_reduce.cuh"

namespace w4q::quantize {
namespace {

using device::element_blocks;
using device::element_threads;
/// Rows of one product.
constexpr int64_t product_rows = 4096;

__global__ void __launch_bounds__(element_threads)
    apart_kernel(const __half* plain, const __half* quantized, int64_t count, __half* apart) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) apart[at] = __float2half_rn(__half2float(plain[at]) - __half2float(quantized[at]));
}

__global__ void __launch_bounds__(element_threads) add_kernel(const float* product, int64_t count, double* sums) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) sums[at] += static_cast<double>(product[at]);
}

__global__ void __launch_bounds__(element_threads)
    mean_kernel(const double* sums, int64_t count, double scale, float* matrix) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < count) matrix[at] = static_cast<float>(sums[at] * scale);
}

/// by_position[r][p] = moves[r][columns[p]].
__global__ void __launch_bounds__(element_threads)
    place_kernel(const float* moves, int64_t n, int64_t k, const int32_t* columns, float* by_position) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < n * k) by_position[at] = moves[at / k * k + columns[at % k]];
}

__global__ void __launch_bounds__(element_threads)
    divide_kernel(float* by_position, int64_t n, int64_t k, const float* pivots, double mean) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < n * k) by_position[at] *= static_cast<float>(1 / (mean * static_cast<double>(pivots[at % k])));
}

/// weight[r][columns[p]] += by_position[r][p], a block for each row, as far as `limit` lets the row move.
__global__ void __launch_bounds__(element_threads)
    add_moves_kernel(const float* by_position, int64_t k, const int32_t* columns, MoveLimit limit, float* weight) {
  __shared__ double slots[32];
  const float* const moves = by_position + int64_t{blockIdx.x} * k;
  float* const row = weight + int64_t{blockIdx.x} * k;
  double own = 0, size = 0, along = 0;
  for (int64_t p = threadIdx.x; p < k; p += element_threads) {
    const double value = row[columns[p]], step = moves[p];
    own += value * value, size += step * step, along += value * step;
  }
  const auto add = [](double a, double b) { return a + b; };
  own = kernels::block_reduce(own, slots, 0.0, add);
  size = kernels::block_reduce(size, slots, 0.0, add);
  along = kernels::block_reduce(along, slots, 0.0, add);
  const auto part = static_cast<float>(part_of_move(own, size, along, limit));
  for (int64_t p = threadIdx.x; p < k; p += element_threads) row[columns[p]] += part * moves[p];
}

}  // namespace

DriftCuda::DriftCuda(CudaWork& work, const double* sums, int64_t width, int64_t count)
    : work_(work),
      width_(width),
      tokens_(count),
      matrix_(work.context, static_cast<size_t>(width * width) * sizeof(float)) {
  const double scale = count > 0 ? 1.0 / static_cast<double>(count) : 0.0;
  mean_kernel<<<element_blocks(width * width), element_threads, 0, work.stream.get()>>>(sums, width * width, scale,
                                                                                        matrix_.as<float>());
  device::check_launch("drift", concat(width));
  work.stream.synchronize();
}

void DriftCuda::divide(std::span<const float> scales) { divide_square(work_, matrix_.as<float>(), width_, scales); }

void DriftCuda::rotate(const RotationCuda& rotation) {
  ensure(rotation.k() == width_, "DriftCuda: shapes do not fit");
  auto* const matrix = matrix_.as<float>();
  for (int side = 0; side < 2; ++side) {
    rotation.rotate(work_, matrix, width_);
    transpose_square(work_, matrix, width_);
  }
}

InputPairCuda::InputPairCuda(CudaWork& work, int64_t width)
    : work_(work),
      width_(width),
      quantized_(work, width, true),
      sums_(work.context, static_cast<size_t>(width * width) * sizeof(double)),
      apart_(work.context, static_cast<size_t>(product_rows * width) * sizeof(__half)) {
  sums_.fill(0, work.stream);
}

void InputPairCuda::add_rows(const __half* plain, const __half* quantized, int64_t count) {
  quantized_.add_rows(quantized, count);
  count_ += count;
  const cudaStream_t stream = work_.stream.get();
  auto* const product = work_.square.get<float>(width_ * width_);
  for (int64_t begin = 0; begin < count; begin += product_rows) {
    const int64_t rows = std::min(product_rows, count - begin), first = begin * width_;
    apart_kernel<<<element_blocks(rows * width_), element_threads, 0, stream>>>(plain + first, quantized + first,
                                                                                rows * width_, apart_.as<__half>());
    device::cublas_gram(apart_.data(), quantized + first, rows, width_, product, work_.cublas.data(), work_.stream);
    add_kernel<<<element_blocks(width_ * width_), element_threads, 0, stream>>>(product, width_ * width_,
                                                                                sums_.as<double>());
  }
  device::check_launch("drift sums", concat(count, " × ", width_));
}

InputPair InputPairCuda::download(std::string_view name) const {
  return {quantized_.download(name), work_.fetch(sums_.as<double>(), width_ * width_), nullptr};
}

InputPair InputPairCuda::keep(std::string_view name) const {
  InputPair result{quantized_.channels(name), {}, std::make_shared<DriftCuda>(drift())};
  result.quantized.gpu_gram = std::make_shared<GramCuda>(quantized_.gram());
  return result;
}

void follow_inputs_cuda(CudaWork& work, float* weight, int64_t n, const DriftCuda& drift, const GramCuda& gram,
                        const ErrorFactorCuda& factor, const MoveLimit& limit) {
  const int64_t k = drift.width();
  ensure(factor.width() == k && gram.width() == k, "follow_inputs: other shapes");
  const double mean = mean_diagonal(gram.diagonal(), "inputs");
  auto* const moves = work.errors.get<float>(n * k);
  auto* const by_position = work.scaled.get<float>(n * k);
  const device::CublasFloatProduct product{.m = n,
                                           .n = k,
                                           .k = k,
                                           .a = weight,
                                           .lda = k,
                                           .b = drift.data(),
                                           .ldb = k,
                                           .c = moves,
                                           .ldc = k,
                                           .workspace = work.cublas.data()};
  device::cublas_multiply(product, work.stream);
  const cudaStream_t stream = work.stream.get();
  const unsigned grid = element_blocks(n * k);
  place_kernel<<<grid, element_threads, 0, stream>>>(moves, n, k, factor.columns(), by_position);
  device::cublas_solve(factor.coupling(), false, by_position, n, k, work.cublas.data(), work.stream);
  divide_kernel<<<grid, element_threads, 0, stream>>>(by_position, n, k, factor.pivots(), mean);
  device::cublas_solve(factor.coupling(), true, by_position, n, k, work.cublas.data(), work.stream);
  add_moves_kernel<<<static_cast<unsigned>(n), element_threads, 0, stream>>>(by_position, k, factor.columns(), limit,
                                                                             weight);
  device::check_launch("targets for quantized inputs", concat(n, " × ", k));
}

}  // namespace w4q::quantize
