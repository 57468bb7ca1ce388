#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "quantize/statistics_cuda.h"

namespace w4q::quantize {
namespace {

constexpr int64_t product_rows = 4096;
constexpr int lanes = 32;      ///< channels of a block
constexpr int row_lanes = 16;  ///< threads of a channel
constexpr int row_threads = 256;

__device__ float value_of(__half x) { return __half2float(x); }
__device__ float value_of(float x) { return x; }

/// sums[c] += Σ |x|, sums[k + c] += Σ x²: a thread adds every sixteenth row, then the sixteen sums are added in order.
template <class T>
__global__ void __launch_bounds__(lanes* row_lanes)
    channel_sums_kernel(const T* x, int64_t rows, int64_t k, double* sums) {
  __shared__ double shared_abs[row_lanes][lanes], shared_squares[row_lanes][lanes];
  const int64_t c = int64_t{blockIdx.x} * lanes + threadIdx.x;
  double sum_abs = 0, sum_squares = 0;
  for (int64_t r = threadIdx.y; c < k && r < rows; r += row_lanes) {
    const double value = value_of(x[r * k + c]);
    sum_abs += fabs(value);
    sum_squares += value * value;
  }
  shared_abs[threadIdx.y][threadIdx.x] = sum_abs;
  shared_squares[threadIdx.y][threadIdx.x] = sum_squares;
  __syncthreads();
  if (threadIdx.y != 0 || c >= k) return;
  for (int lane = 1; lane < row_lanes; ++lane) {
    sum_abs += shared_abs[lane][threadIdx.x];
    sum_squares += shared_squares[lane][threadIdx.x];
  }
  sums[c] += sum_abs;
  sums[k + c] += sum_squares;
}

/// The upper triangle of `product` to that of `gram`, a block per row.
__global__ void __launch_bounds__(row_threads) add_triangle_kernel(const float* product, int64_t k, double* gram) {
  const int64_t i = blockIdx.x;
  double* const sums = gram + (i * k - i * (i - 1) / 2) - i;
  for (int64_t j = i + threadIdx.x; j < k; j += row_threads) sums[j] += static_cast<double>(product[i * k + j]);
}

__global__ void __launch_bounds__(row_threads)
    mean_kernel(const double* sums, int64_t count, double scale, float* means) {
  const int64_t at = int64_t{blockIdx.x} * row_threads + threadIdx.x;
  if (at < count) means[at] = mean_of_sum(sums[at], scale);
}

}  // namespace

StatisticsCuda::StatisticsCuda(CudaWork& work, int64_t width, bool with_gram)
    : work_(work),
      width_(width),
      sums_(work.stream, static_cast<size_t>(2 * width) * sizeof(double)),
      gram_(work.stream, with_gram ? static_cast<size_t>(triangle_size(width)) * sizeof(double) : 0) {
  sums_.fill(0, work_.stream);
  if (with_gram) gram_.fill(0, work_.stream);
}

template <class T, class Multiply>
void StatisticsCuda::add(const T* rows, int64_t count, const Multiply& multiply) {
  const device::Stream& stream = work_.stream;
  channel_sums_kernel<<<static_cast<unsigned>((width_ + lanes - 1) / lanes), dim3(lanes, row_lanes), 0, stream.get()>>>(
      rows, count, width_, sums_.as<double>());
  device::check_launch("channel sums", concat(count, " × ", width_));
  count_ += count;
  if (!has_gram()) return;
  auto* const product = work_.square.get<float>(width_ * width_);
  for (int64_t begin = 0; begin < count; begin += product_rows) {
    multiply(rows + begin * width_, std::min(product_rows, count - begin), product);
    add_triangle_kernel<<<static_cast<unsigned>(width_), row_threads, 0, stream.get()>>>(product, width_,
                                                                                         gram_.as<double>());
    device::check_launch("Gram sums", concat(width_));
  }
}

void StatisticsCuda::add_rows(const __half* rows, int64_t count) {
  add(rows, count, [this](const __half* some, int64_t some_count, float* product) {
    device::cublas_gram(some, some, some_count, width_, product, work_.cublas.data(), work_.stream);
  });
}

void StatisticsCuda::add_rows(const float* rows, int64_t count) {
  add(rows, count, [this](const float* some, int64_t some_count, float* product) {
    const device::CublasFloatProduct square{.m = width_,
                                            .n = width_,
                                            .k = some_count,
                                            .a = some,
                                            .lda = width_,
                                            .b = some,
                                            .ldb = width_,
                                            .c = product,
                                            .ldc = width_,
                                            .workspace = work_.cublas.data(),
                                            .a_transposed = true,
                                            .tensor_cores = true};
    device::cublas_multiply(square, work_.stream);
  });
}

InputStatistics StatisticsCuda::channels(std::string_view name) const {
  InputStatistics result;
  result.width = width_;
  result.count = count_;
  const auto sums = work_.fetch(sums_.as<double>(), 2 * width_);
  result.sum_abs.assign(sums.begin(), sums.begin() + width_);
  result.sum_squares.assign(sums.begin() + width_, sums.end());
  check_finite(result, name);
  return result;
}

const float* StatisticsCuda::mean_triangle(std::string_view name) const {
  ensure(has_gram(), "StatisticsCuda: no Gram matrix");
  channels(name);  // refuses what is not finite
  const int64_t count = triangle_size(width_);
  auto* const means = work_.square.get<float>(count);
  mean_kernel<<<static_cast<unsigned>((count + row_threads - 1) / row_threads), row_threads, 0, work_.stream.get()>>>(
      gram_.as<double>(), count, count_ > 0 ? 1.0 / static_cast<double>(count_) : 0.0, means);
  device::check_launch("means", concat(width_));
  return means;
}

InputStatistics StatisticsCuda::download(std::string_view name) const {
  InputStatistics result = channels(name);
  if (has_gram()) result.gram = work_.fetch(gram_.as<double>(), triangle_size(width_));
  return result;
}

}  // namespace w4q::quantize
