#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/delta_net/delta_net_cuda.h"

namespace w4q::kernels {
namespace {

constexpr int most_taps = 8;
constexpr float l2_eps = 1e-6f;

/// Where the products of a row stand.
struct Places {
  DeltaShape shape;
  DeltaOrder order;

  __device__ int64_t per_key() const { return shape.value_heads / shape.key_heads; }
  __device__ int64_t stretch() const { return 2 * shape.key_dim + 2 * per_key() * shape.value_dim; }
  /// A convolved channel: queries, keys, values of all heads.
  __device__ int64_t channel(int64_t c) const {
    if (order == DeltaOrder::parts) return c;
    const int64_t keys = shape.keys();
    if (c < 2 * keys) {
      const int64_t at = c % keys;
      return at / shape.key_dim * stretch() + c / keys * shape.key_dim + at % shape.key_dim;
    }
    const int64_t width = per_key() * shape.value_dim, at = c - 2 * keys;
    return at / width * stretch() + 2 * shape.key_dim + at % width;
  }
  __device__ int64_t gate(int64_t head, int64_t j) const {
    if (order == DeltaOrder::parts) return shape.channels() + head * shape.value_dim + j;
    const int64_t each = per_key();
    return head / each * stretch() + 2 * shape.key_dim + (each + head % each) * shape.value_dim + j;
  }
  __device__ int64_t beta(int64_t head) const { return small(head, 0); }
  __device__ int64_t decay(int64_t head) const { return small(head, 1); }

 private:
  __device__ int64_t small(int64_t head, int which) const {
    const int64_t from = shape.channels() + shape.values();
    if (order == DeltaOrder::parts) return from + which * shape.value_heads + head;
    const int64_t each = per_key();
    return from + head / each * 2 * each + which * each + head % each;
  }
};

__device__ float silu_of(float x) { return x / (1.0f + expf(-x)); }

/// A thread for each channel and stretch of rows. Inputs before the first row are the history's.
__global__ void convolve_kernel(const DeltaNetArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const Places places{args.shape, args.order};
  const int64_t channels = args.shape.channels(), c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  const int taps = static_cast<int>(args.shape.taps);
  const int64_t from = places.channel(c), row = blockIdx.y;
  float sum = 0;
  for (int t = 0; t < taps; ++t) {
    const int64_t at = row - (taps - 1) + t;
    float x = 0;
    if (at >= 0) {
      x = __ldcg(args.products + at * args.stride + from);
    } else if (!args.begins) {
      x = args.memory.history[(taps - 1 + at) * channels + c];
    }
    sum = fmaf(__ldg(args.convolution + c * taps + t), x, sum);
  }
  args.mixed[row * channels + c] = silu_of(sum);
}

/// The last inputs become the history. Behind convolve_kernel, which reads the old one.
__global__ void remember_kernel(const DeltaNetArgs args) {
  const Places places{args.shape, args.order};
  const int64_t channels = args.shape.channels(), c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  const int past = static_cast<int>(args.shape.taps) - 1;
  const int64_t from = places.channel(c);
  float last[most_taps];
  for (int t = 0; t < past; ++t) {
    const int64_t at = args.rows - past + t;
    last[t] = at >= 0       ? args.products[at * args.stride + from]
              : args.begins ? 0.0f
                            : args.memory.history[(past + at) * channels + c];
  }
  for (int t = 0; t < past; ++t) args.memory.history[t * channels + c] = last[t];
}

/// A block for each value head: threads (value channel j, slice of keys). A thread holds key_dim / slices values of the
/// state of its channel.
constexpr int slices = 4;
template <int most_keys>
__global__ void __launch_bounds__(1024) rule_kernel(const DeltaNetArgs args) {
  extern __shared__ float shared[];
  constexpr int own = most_keys / slices;
  const DeltaShape& shape = args.shape;
  const Places places{shape, args.order};
  const int keys = static_cast<int>(shape.key_dim), width = static_cast<int>(shape.value_dim);
  float* const query = shared;
  float* const key = query + keys;
  float* const sums = key + keys;              // [slices][width]
  float* const slots = sums + slices * width;  // 32
  const int j = threadIdx.x % width, slice = threadIdx.x / width;
  const bool active = slice < slices;
  const int count = keys / slices, first = slice * count;
  const int64_t head = blockIdx.x;
  const int64_t from = head / places.per_key() * keys;
  float* const memory = args.memory.state + head * keys * width;
  const auto add = [](float a, float b) { return a + b; };
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  float state[own];
#pragma unroll
  for (int i = 0; i < own; ++i) {
    state[i] = active && i < count && !args.begins ? memory[(first + i) * width + j] : 0.0f;
  }
  const float rate = -expf(args.rate[head]), bias = args.bias[head];
  const float weight = active && slice == 0 ? args.norm[j] : 0.0f;
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const mixed = args.mixed + row * shape.channels();
    const float* const products = args.products + row * args.stride;
    float q2 = 0, k2 = 0;
    for (int i = threadIdx.x; i < keys; i += blockDim.x) {
      const float q = __ldcg(mixed + from + i), k = __ldcg(mixed + shape.keys() + from + i);
      query[i] = q, key[i] = k;
      q2 += q * q, k2 += k * k;
    }
    const float q_scale = rsqrtf(block_reduce(q2, slots, 0.0f, add) + l2_eps) * rsqrtf(static_cast<float>(keys));
    const float k_scale = rsqrtf(block_reduce(k2, slots, 0.0f, add) + l2_eps);
    const float beta = 1.0f / (1.0f + expf(-__ldcg(products + places.beta(head))));
    const float step = __ldcg(products + places.decay(head)) + bias;
    const float decay = expf(rate * (step > 20.0f ? step : log1pf(expf(step))));
    float seen = 0;
    if (active) {
#pragma unroll
      for (int i = 0; i < own; ++i) {
        if (i >= count) break;
        state[i] *= decay;
        seen = fmaf(state[i], key[first + i], seen);
      }
      sums[slice * width + j] = seen * k_scale;
    }
    __syncthreads();
    float out = 0;
    if (active) {
      float all = 0;
#pragma unroll
      for (int s = 0; s < slices; ++s) all += sums[s * width + j];
      const float value = __ldcg(mixed + 2 * shape.keys() + head * width + j);
      const float learned = (value - all) * beta * k_scale;
#pragma unroll
      for (int i = 0; i < own; ++i) {
        if (i >= count) break;
        state[i] = fmaf(key[first + i], learned, state[i]);
        out = fmaf(state[i], query[first + i], out);
      }
    }
    __syncthreads();
    if (active) sums[slice * width + j] = out * q_scale;
    __syncthreads();
    float whole = 0;
    if (active && slice == 0) {
#pragma unroll
      for (int s = 0; s < slices; ++s) whole += sums[s * width + j];
    }
    const float squares = block_reduce(whole * whole, slots, 0.0f, add);
    if (active && slice == 0) {
      const float normed = whole * rsqrtf(squares / static_cast<float>(width) + args.eps) * weight;
      const float gated = normed * silu_of(__ldcg(products + places.gate(head, j)));
      args.out[row * shape.values() + head * width + j] = __float2half_rn(fminf(fmaxf(gated, -65504.0f), 65504.0f));
    }
  }
  if (!active) return;
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (i < count) memory[(first + i) * width + j] = state[i];
  }
}

}  // namespace

bool takes_delta_net(const DeltaShape& shape) noexcept {
  return shape.key_dim <= 256 && shape.key_dim % slices == 0 && shape.value_dim * slices <= 1024 &&
         shape.value_dim >= 1 && shape.taps <= most_taps;
}

void delta_net_cuda(const DeltaNetArgs& args, const device::Stream& stream) {
  const DeltaShape& shape = args.shape;
  ensure(takes_delta_net(shape), "delta_net: heads that the kernel does not take");
  constexpr int threads = 128;
  const auto blocks = static_cast<unsigned>((shape.channels() + threads - 1) / threads);
  launch<convolve_kernel>(
      {.grid = dim3(blocks, static_cast<unsigned>(args.rows)), .threads = threads, .overlap = args.overlap}, stream,
      "delta_convolve", args);
  launch<remember_kernel>({.grid = dim3(blocks), .threads = threads}, stream, "delta_remember", args);
  const int wanted = static_cast<int>(shape.value_dim) * slices;
  const LaunchShape launched{
      .grid = dim3(static_cast<unsigned>(shape.value_heads)),
      .threads = (wanted + 31) / 32 * 32,
      .shared_bytes = static_cast<size_t>(2 * shape.key_dim + slices * shape.value_dim + 32) * sizeof(float)};
  if (shape.key_dim <= 64) return launch<rule_kernel<64>>(launched, stream, "delta_rule", args);
  if (shape.key_dim <= 128) return launch<rule_kernel<128>>(launched, stream, "delta_rule", args);
  launch<rule_kernel<256>>(launched, stream, "delta_rule", args);
}

}  // namespace w4q::kernels
