#include "kernels/gradient/gradient_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "kernels/common/block_reduce.cuh"
#include "kernels/elementwise/gated.cuh"

namespace w4q::kernels {
namespace {

using device::element_blocks;
using device::element_threads;
constexpr int lanes = 32, row_lanes = 16;

__device__ int64_t value_at() { return int64_t{blockIdx.x} * element_threads + threadIdx.x; }
__device__ float add(float a, float b) { return a + b; }

/// 1/√(mean(x²) + eps), by all threads of a block.
__device__ float row_scale(const float* x, int64_t size, float eps, float* slots) {
  float sum = 0;
  for (int64_t c = threadIdx.x; c < size; c += element_threads) sum += x[c] * x[c];
  return 1.0f / sqrtf(block_reduce(sum, slots, 0.0f, add) / static_cast<float>(size) + eps);
}

__global__ void __launch_bounds__(element_threads) norm_kernel(NormedRows norm, float* y) {
  __shared__ float slots[32];
  const int64_t first = int64_t{blockIdx.x} * norm.size;
  const float scale = row_scale(norm.x + first, norm.size, norm.eps, slots);
  for (int64_t c = threadIdx.x; c < norm.size; c += element_threads)
    y[first + c] = norm.weight[c] * (norm.x[first + c] * scale);
}

/// scale · (w·g − x̂ · mean(w·g·x̂)).
__global__ void __launch_bounds__(element_threads) norm_gradient_kernel(NormedRows norm, float* gradient) {
  __shared__ float slots[32];
  const int64_t first = int64_t{blockIdx.x} * norm.size;
  const float* const x = norm.x + first;
  const float scale = row_scale(x, norm.size, norm.eps, slots);
  float sum = 0;
  for (int64_t c = threadIdx.x; c < norm.size; c += element_threads)
    sum += norm.weight[c] * gradient[first + c] * (x[c] * scale);
  const float mean = block_reduce(sum, slots, 0.0f, add) / static_cast<float>(norm.size);
  for (int64_t c = threadIdx.x; c < norm.size; c += element_threads) {
    gradient[first + c] = scale * (norm.weight[c] * gradient[first + c] - x[c] * scale * mean);
  }
}

__global__ void __launch_bounds__(element_threads) scales_kernel(NormedRows norm, float* scales) {
  __shared__ float slots[32];
  const float scale = row_scale(norm.x + int64_t{blockIdx.x} * norm.size, norm.size, norm.eps, slots);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

/// A thread adds every sixteenth row of a channel, then the sixteen sums are added in order.
__global__ void __launch_bounds__(lanes* row_lanes)
    weight_gradient_kernel(NormedRows norm, const float* gradient, const float* scales, double* sums) {
  __shared__ double shared[row_lanes][lanes];
  const int64_t c = int64_t{blockIdx.x} * lanes + threadIdx.x;
  double sum = 0;
  for (int64_t r = threadIdx.y; c < norm.size && r < norm.rows; r += row_lanes) {
    const int64_t at = r * norm.size + c;
    sum += static_cast<double>(gradient[at]) * static_cast<double>(norm.x[at] * scales[r]);
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= norm.size) return;
  for (int lane = 1; lane < row_lanes; ++lane) sum += shared[lane][threadIdx.x];
  sums[c] += sum;
}

__global__ void __launch_bounds__(element_threads) rotate_kernel(RotatedRows rows) {
  const int64_t at = value_at();
  if (at >= rows.count * rows.heads * rows.pairs) return;
  const int64_t pair = at % rows.pairs, head = at / rows.pairs % rows.heads, row = at / rows.pairs / rows.heads;
  float* const x = rows.x + (row * rows.heads + head) * rows.head_dim;
  const int64_t i = rows.neighbours ? 2 * pair : pair, j = rows.neighbours ? 2 * pair + 1 : pair + rows.pairs;
  const float c = rows.cosine[row * rows.pairs + pair],
              s = rows.sine[row * rows.pairs + pair] * (rows.back ? -1.0f : 1.0f);
  const float a = x[i], b = x[j];
  x[i] = a * c - b * s;
  x[j] = b * c + a * s;
}

__global__ void __launch_bounds__(element_threads)
    gate_kernel(Gating gating, const float* gate, const float* up, int64_t count, float* out) {
  const int64_t at = value_at();
  if (at < count) out[at] = gated(gating.activation, static_cast<float>(gating.limit), gate[at], up[at]);
}

/// An activation without its factor, and its slope.
__device__ Activated activated_at(const Gating& gating, float g) {
  if (gating.activation == Activation::silu) {
    const float s = sigmoid(g);
    return {g * s, s * (1.0f + g * (1.0f - s))};
  }
  if (gating.activation == Activation::gelu) {
    const float share = 0.5f * (1.0f + erff(g * root_half));
    return {g * share, share + g * 0.3989422804014327f * expf(-0.5f * g * g)};
  }
  if (gating.activation == Activation::gelu_tanh) {
    const float t = tanhf(gelu_slope * (g + 0.044715f * g * g * g));
    return {0.5f * g * (1.0f + t),
            0.5f * (1.0f + t) + 0.5f * g * (1.0f - t * t) * gelu_slope * (1.0f + 3.0f * 0.044715f * g * g)};
  }
  if (is_plain_activation(gating.activation)) return plain_activation_at(gating.activation, g);
  const float limit = static_cast<float>(gating.limit), clamped = fminf(g, limit), s = sigmoid(clamped * swiglu_slope);
  return {clamped * s, g <= limit ? s * (1.0f + clamped * swiglu_slope * (1.0f - s)) : 0.0f};
}

__global__ void __launch_bounds__(element_threads)
    gate_gradient_kernel(Gating gating, const float* gate, const float* up, const float* gradient, int64_t count,
                         float* by_gate, float* by_up) {
  const int64_t at = value_at();
  if (at >= count) return;
  const auto limit = static_cast<float>(gating.limit);
  const bool clamps = gating.activation == Activation::clamped_swiglu;
  const Activated found = activated_at(gating, gate[at]);
  const float u = up[at], by = gradient[at];
  by_gate[at] = by * found.slope * (clamps ? fminf(fmaxf(u, -limit), limit) + 1.0f : u);
  by_up[at] = !clamps || (u >= -limit && u <= limit) ? by * found.value : 0.0f;
}

__device__ float widened(__half value) { return __half2float(value); }
__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__global__ void __launch_bounds__(element_threads) widen_kernel(const T* values, int64_t count, float* to) {
  const int64_t at = value_at();
  if (at < count) to[at] = widened(values[at]);
}
__global__ void __launch_bounds__(element_threads) add_kernel(float* x, const float* y, int64_t count) {
  const int64_t at = value_at();
  if (at < count) x[at] += y[at];
}
__global__ void __launch_bounds__(element_threads) scale_kernel(float* x, float factor, int64_t count) {
  const int64_t at = value_at();
  if (at < count) x[at] *= factor;
}
__global__ void __launch_bounds__(element_threads)
    bias_kernel(float* x, const float* bias, int64_t count, int64_t cols) {
  const int64_t at = value_at();
  if (at < count) x[at] += bias[at % cols];
}

// ---- losses

struct Finish {
  double scale, cap;

  __device__ double operator()(float x) const {
    const double scaled = static_cast<double>(x) * scale;
    return cap > 0 ? cap * tanh(scaled / cap) : scaled;
  }
  __device__ double slope(double logit) const { return cap > 0 ? scale * (1 - logit / cap * (logit / cap)) : scale; }
};

/// Of its log, in fp32: fp64 exponentials are slow where GPUs are made for graphics.
__device__ double probability(double log) { return static_cast<double>(expf(static_cast<float>(log))); }

/// log Σ exp of a row, by all threads of a block.
__device__ double log_sum(const Finish& finish, const float* products, int64_t count, double* slots) {
  double largest = -INFINITY, sum = 0;
  for (int64_t c = threadIdx.x; c < count; c += element_threads) largest = fmax(largest, finish(products[c]));
  largest = block_reduce(largest, slots, -INFINITY + 0.0, [](double a, double b) { return fmax(a, b); });
  for (int64_t c = threadIdx.x; c < count; c += element_threads) sum += probability(finish(products[c]) - largest);
  return largest + log(block_reduce(sum, slots, 0.0, [](double a, double b) { return a + b; }));
}

__global__ void __launch_bounds__(element_threads)
    cross_entropy_kernel(LogitRows logits, const int32_t* next, double* losses) {
  __shared__ double slots[32];
  float* const products = logits.products + int64_t{blockIdx.x} * logits.cols;
  const int64_t wanted = next[blockIdx.x];
  if (wanted < 0) {
    for (int64_t c = threadIdx.x; c < logits.cols; c += element_threads) products[c] = 0;
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return;
  }
  const Finish finish{logits.scale, logits.cap};
  const double sum = log_sum(finish, products, logits.cols, slots);
  if (threadIdx.x == 0) losses[blockIdx.x] = sum - finish(products[wanted]);
  __syncthreads();
  for (int64_t c = threadIdx.x; c < logits.cols; c += element_threads) {
    const double logit = finish(products[c]);
    products[c] = static_cast<float>((probability(logit - sum) - (c == wanted ? 1.0 : 0.0)) * finish.slope(logit));
  }
}

__global__ void __launch_bounds__(element_threads)
    divergence_kernel(LogitRows expected, LogitRows logits, double* losses) {
  __shared__ double slots[32];
  const Finish wanted_finish{expected.scale, expected.cap}, finish{logits.scale, logits.cap};
  const float* const wanted = expected.products + int64_t{blockIdx.x} * expected.cols;
  float* const products = logits.products + int64_t{blockIdx.x} * logits.cols;
  const double wanted_sum = log_sum(wanted_finish, wanted, expected.cols, slots);
  const double sum = log_sum(finish, products, logits.cols, slots);
  double loss = 0;
  for (int64_t c = threadIdx.x; c < logits.cols; c += element_threads) {
    const double by = wanted_finish(wanted[c]) - wanted_sum, logit = finish(products[c]), p = probability(by);
    loss += p * (by - (logit - sum));
    products[c] = static_cast<float>((probability(logit - sum) - p) * finish.slope(logit));
  }
  loss = block_reduce(loss, slots, 0.0, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}

}  // namespace

void norm_rows_cuda(const NormedRows& norm, float* y, const device::Stream& stream) {
  norm_kernel<<<static_cast<unsigned>(norm.rows), element_threads, 0, stream.get()>>>(norm, y);
  device::check_launch("norms", concat(norm.rows, " × ", norm.size));
}

void norm_rows_gradient_cuda(const NormedRows& norm, float* gradient, const device::Stream& stream) {
  norm_gradient_kernel<<<static_cast<unsigned>(norm.rows), element_threads, 0, stream.get()>>>(norm, gradient);
  device::check_launch("gradients of norms", concat(norm.rows, " × ", norm.size));
}

void norm_weight_gradient_cuda(const NormedRows& norm, const float* gradient, float* scratch, double* sums,
                               const device::Stream& stream) {
  scales_kernel<<<static_cast<unsigned>(norm.rows), element_threads, 0, stream.get()>>>(norm, scratch);
  weight_gradient_kernel<<<static_cast<unsigned>((norm.size + lanes - 1) / lanes), dim3(lanes, row_lanes), 0,
                           stream.get()>>>(norm, gradient, scratch, sums);
  device::check_launch("gradients by norms", concat(norm.rows, " × ", norm.size));
}

void rotate_rows_cuda(const RotatedRows& rows, const device::Stream& stream) {
  const int64_t count = rows.count * rows.heads * rows.pairs;
  if (count == 0) return;
  rotate_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(rows);
  device::check_launch("rotated heads", concat(rows.count, " × ", rows.heads));
}

void gate_rows_cuda(const Gating& gating, const float* gate, const float* up, int64_t count, float* out,
                    const device::Stream& stream) {
  gate_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(gating, gate, up, count, out);
  device::check_launch("gates", concat(count));
}

void gate_rows_gradient_cuda(const Gating& gating, const float* gate, const float* up, const float* gradient,
                             int64_t count, float* by_gate, float* by_up, const device::Stream& stream) {
  gate_gradient_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(gating, gate, up, gradient, count,
                                                                                    by_gate, by_up);
  device::check_launch("gradients of gates", concat(count));
}

void widen_values_cuda(const void* values, DType dtype, int64_t count, float* to, const device::Stream& stream) {
  ensure(dtype == DType::f16 || dtype == DType::bf16, "widen_values: of f16 or bf16");
  if (dtype == DType::f16) {
    widen_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(static_cast<const __half*>(values), count,
                                                                              to);
  } else {
    widen_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(static_cast<const __nv_bfloat16*>(values),
                                                                              count, to);
  }
  device::check_launch("widened weights", concat(count));
}

void add_values_cuda(float* x, const float* y, int64_t count, const device::Stream& stream) {
  add_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(x, y, count);
  device::check_launch("sums", concat(count));
}

void scale_values_cuda(float* x, float factor, int64_t count, const device::Stream& stream) {
  if (factor == 1) return;
  scale_kernel<<<element_blocks(count), element_threads, 0, stream.get()>>>(x, factor, count);
  device::check_launch("products", concat(count));
}

void add_bias_cuda(float* x, const float* bias, int64_t rows, int64_t cols, const device::Stream& stream) {
  bias_kernel<<<element_blocks(rows * cols), element_threads, 0, stream.get()>>>(x, bias, rows * cols, cols);
  device::check_launch("biases", concat(rows, " × ", cols));
}

void cross_entropy_rows_cuda(const LogitRows& logits, const int32_t* next, double* losses,
                             const device::Stream& stream) {
  cross_entropy_kernel<<<static_cast<unsigned>(logits.rows), element_threads, 0, stream.get()>>>(logits, next, losses);
  device::check_launch("cross entropy", concat(logits.rows, " × ", logits.cols));
}

void divergence_rows_cuda(const LogitRows& expected, const LogitRows& logits, double* losses,
                          const device::Stream& stream) {
  divergence_kernel<<<static_cast<unsigned>(logits.rows), element_threads, 0, stream.get()>>>(expected, logits, losses);
  device::check_launch("divergence", concat(logits.rows, " × ", logits.cols));
}

}  // namespace w4q::kernels
