#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "kernels/common/block_reduce.cuh"
#include "quantize/gram_cuda.h"

namespace w4q::quantize {
namespace {

using device::element_blocks;
using device::element_threads;
constexpr int tile = 32;
/// Stripes of EᵀE that are computed from their diagonal block on: (stripes + 1) / 2·stripes of the whole product.
constexpr int64_t most_stripes = 8;
constexpr int64_t stripe_multiple = 128;

int64_t stripe_width(int64_t k) {
  const int64_t width = (k + most_stripes - 1) / most_stripes;
  return std::max<int64_t>(512, (width + stripe_multiple - 1) / stripe_multiple * stripe_multiple);
}

/// matrix[i][j] = matrix[j][i] = triangle(i, j) · scale, of which `share` off the diagonal, a tile of 32 × 32 on and above the diagonal a block.
template <class T>
__global__ void expand_kernel(const T* triangle, int64_t k, double scale, double share, float* matrix) {
  if (blockIdx.x < blockIdx.y) return;
  __shared__ float values[tile][tile + 1];
  const int64_t row = int64_t{blockIdx.y} * tile, col = int64_t{blockIdx.x} * tile;
  for (int r = static_cast<int>(threadIdx.y); r < tile; r += static_cast<int>(blockDim.y)) {
    const int64_t i = row + r, j = col + threadIdx.x;
    if (i >= k || j >= k || j < i) continue;
    const float mean = mean_of_sum(triangle[i * k - i * (i - 1) / 2 + j - i], scale);
    const float value = i == j ? mean : supported_mean(mean, share);
    values[r][threadIdx.x] = value;
    matrix[i * k + j] = value;
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.y); r < tile; r += static_cast<int>(blockDim.y)) {
    const int64_t i = row + threadIdx.x, j = col + r;
    if (i < k && j < k && j > i) matrix[j * k + i] = values[threadIdx.x][r];
  }
}

__global__ void set_diagonal_kernel(const double* sums, int64_t k, double scale, float* matrix) {
  const int64_t i = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (i < k) matrix[i * k + i] = static_cast<float>(sums[i] * scale);
}

__global__ void divide_kernel(float* matrix, int64_t k, const float* scales) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < k * k) matrix[at] = matrix[at] / scales[at / k] / scales[at % k];
}

/// A tile below the diagonal and the one above that it mirrors: both turned, or both their mean.
template <bool mean>
__global__ void mirror_kernel(float* matrix, int64_t k) {
  if (blockIdx.x < blockIdx.y) return;
  __shared__ float above[tile][tile + 1], below[tile][tile + 1];
  const int64_t row = int64_t{blockIdx.y} * tile, col = int64_t{blockIdx.x} * tile;
  const int x = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.y);
  for (int r = static_cast<int>(threadIdx.y); r < tile; r += step) {
    if (row + r < k && col + x < k) above[r][x] = matrix[(row + r) * k + col + x];
    if (col + r < k && row + x < k) below[r][x] = matrix[(col + r) * k + row + x];
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.y); r < tile; r += step) {
    const float up = mean ? (above[r][x] + below[x][r]) / 2 : below[x][r];
    const float down = mean ? (above[x][r] + below[r][x]) / 2 : above[x][r];
    if (row + r < k && col + x < k) matrix[(row + r) * k + col + x] = up;
    if (blockIdx.x != blockIdx.y && col + r < k && row + x < k) matrix[(col + r) * k + row + x] = down;
  }
}

__global__ void diagonal_kernel(const float* matrix, int64_t k, float* diagonal) {
  const int64_t i = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (i < k) diagonal[i] = matrix[i * k + i];
}

/// sums[i] = Σ_{j ≥ i} (2 off the diagonal) · square[i][j] · gram[i][j], a block per row.
__global__ void __launch_bounds__(element_threads)
    row_products_kernel(const float* square, const float* gram, int64_t k, double* sums) {
  __shared__ double slots[32];
  const int64_t i = blockIdx.x;
  double sum = 0;
  for (int64_t j = i + threadIdx.x; j < k; j += element_threads) {
    const double product = static_cast<double>(square[i * k + j]) * static_cast<double>(gram[i * k + j]);
    sum += j == i ? product : 2 * product;
  }
  sum = kernels::block_reduce(sum, slots, 0.0, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) sums[i] = sum;
}

}  // namespace

template <class T>
void GramCuda::expand(const T* triangle, double scale, double share) {
  const auto tiles = static_cast<unsigned>((width_ + tile - 1) / tile);
  expand_kernel<<<dim3(tiles, tiles), dim3(tile, 8), 0, work_->stream.get()>>>(triangle, width_, scale, share,
                                                                               matrix_.as<float>());
  device::check_launch("Gram matrix", concat(width_));
  work_->stream.synchronize();
}

GramCuda::GramCuda(CudaWork& work, const InputStatistics& statistics)
    : work_(&work),
      width_(statistics.width),
      matrix_(work.stream, static_cast<size_t>(width_ * width_) * sizeof(float)) {
  const double scale = statistics.count > 0 ? 1.0 / static_cast<double>(statistics.count) : 0.0;
  if (statistics.has_gram()) {
    // The triangle passes through the memory of the squares, which are twice as many but half as wide.
    const double* const triangle =
        work_->put(work_->square, statistics.gram.data(), static_cast<int64_t>(statistics.gram.size()));
    expand(triangle, scale, supported_share(statistics.count, width_, noise_of_inputs));
    return;
  }
  matrix_.fill(0, work_->stream);
  const double* const sums = work_->put(work_->sums, statistics.sum_squares.data(), width_);
  set_diagonal_kernel<<<element_blocks(width_), element_threads, 0, work_->stream.get()>>>(sums, width_, scale,
                                                                                           matrix_.as<float>());
  device::check_launch("diagonal", concat(width_));
}

GramCuda::GramCuda(CudaWork& work, const double* triangle, int64_t width, int64_t count)
    : work_(&work), width_(width), matrix_(work.stream, static_cast<size_t>(width * width) * sizeof(float)) {
  expand(triangle, count > 0 ? 1.0 / static_cast<double>(count) : 0.0, supported_share(count, width, noise_of_inputs));
}

GramCuda::GramCuda(CudaWork& work, std::span<const float> triangle, int64_t width)
    : work_(&work), width_(width), matrix_(work.stream, static_cast<size_t>(width * width) * sizeof(float)) {
  ensure(std::ssize(triangle) == triangle_size(width), "GramCuda: not a triangle");
  expand(work.put(work.square, triangle.data(), std::ssize(triangle)), 1.0, 1.0);
}

GramCuda::GramCuda(CudaWork& work, MatrixView<const float> gram)
    : work_(&work),
      width_(gram.rows),
      matrix_(work.stream, static_cast<size_t>(gram.rows * gram.rows) * sizeof(float)) {
  ensure(gram.rows == gram.cols && gram.stride == gram.cols, "GramCuda: not a square matrix");
  matrix_.upload(std::as_bytes(std::span(gram.data, static_cast<size_t>(width_ * width_))), work_->stream);
  work_->stream.synchronize();
}

void divide_square(CudaWork& work, float* matrix, int64_t k, std::span<const float> scales) {
  ensure(static_cast<int64_t>(scales.size()) == k, "divide_square: shapes do not fit");
  const float* const device = work.put(work.columns, scales.data(), k);
  divide_kernel<<<element_blocks(k * k), element_threads, 0, work.stream.get()>>>(matrix, k, device);
  device::check_launch("scaled Gram matrix", concat(k));
}

void transpose_square(CudaWork& work, float* matrix, int64_t k) {
  const auto tiles = static_cast<unsigned>((k + tile - 1) / tile);
  mirror_kernel<false><<<dim3(tiles, tiles), dim3(tile, 8), 0, work.stream.get()>>>(matrix, k);
  device::check_launch("transposed matrix", concat(k));
}

void GramCuda::divide(std::span<const float> scales) { divide_square(*work_, matrix_.as<float>(), width_, scales); }

void GramCuda::rotate(const RotationCuda& rotation) {
  ensure(rotation.k() == width_, "GramCuda: shapes do not fit");
  const auto tiles = static_cast<unsigned>((width_ + tile - 1) / tile);
  const dim3 grid(tiles, tiles), block(tile, 8);
  auto* const matrix = matrix_.as<float>();
  rotation.rotate(*work_, matrix, width_);
  transpose_square(*work_, matrix, width_);
  rotation.rotate(*work_, matrix, width_);
  // What rounding makes unequal on both sides of the diagonal becomes equal again.
  mirror_kernel<true><<<grid, block, 0, work_->stream.get()>>>(matrix, width_);
  device::check_launch("rotated Gram matrix", concat(width_));
}

std::vector<float> GramCuda::diagonal() const {
  auto* const values = work_->columns.get<float>(width_);
  diagonal_kernel<<<element_blocks(width_), element_threads, 0, work_->stream.get()>>>(data(), width_, values);
  device::check_launch("diagonal", concat(width_));
  return work_->fetch(values, width_);
}

std::vector<float> GramCuda::download() const { return work_->fetch(data(), width_ * width_); }

void GramCuda::add_square(const float* difference, int64_t rows, bool add) const {
  add_square(difference, rows, add, true);
}

void GramCuda::add_square(const float* difference, int64_t rows, bool add, bool rounded) const {
  auto* const square = work_->square.get<float>(width_ * width_);
  const int64_t stripe = stripe_width(width_);
  for (int64_t begin = 0; begin < width_; begin += stripe) {
    const int64_t cols = std::min(stripe, width_ - begin);
    device::cublas_multiply({.m = cols,
                             .n = width_ - begin,
                             .k = rows,
                             .a = difference + begin,
                             .lda = width_,
                             .b = difference + begin,
                             .ldb = width_,
                             .c = square + begin * width_ + begin,
                             .ldc = width_,
                             .workspace = work_->cublas.data(),
                             .a_transposed = true,
                             .add = add,
                             .tensor_cores = rounded},
                            work_->stream);
  }
}

double GramCuda::square_error() const {
  auto* const sums = work_->sums.get<double>(width_);
  row_products_kernel<<<static_cast<unsigned>(width_), element_threads, 0, work_->stream.get()>>>(
      work_->square.get<float>(width_ * width_), data(), width_, sums);
  device::check_launch("output error", concat(width_));
  double total = 0;
  for (const double sum : work_->fetch(sums, width_)) total += sum;
  return total;
}

double GramCuda::error(const float* difference, int64_t rows) const {
  add_square(difference, rows, false, false);
  return square_error();
}

}  // namespace w4q::quantize
