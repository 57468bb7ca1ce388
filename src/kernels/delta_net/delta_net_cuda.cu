#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/delta_net/chunk_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/delta_net/rows.cuh"

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
  args.scratch[row * channels + c] = silu_of(sum);
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

/// Both of one row: a thread reads its channel's history before it moves it on.
__global__ void convolve_step_kernel(const DeltaNetArgs args) {
  const int64_t channels = args.shape.channels(), c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int past = static_cast<int>(args.shape.taps) - 1;
  const bool active = c < channels;
  float inputs[most_taps] = {}, weights[most_taps] = {};
  device::trigger_dependent_launch();
#pragma unroll
  for (int t = 0; t < most_taps; ++t) {
    if (active && t <= past) weights[t] = __ldg(args.convolution + c * (past + 1) + t);
    // Nothing that still runs writes it: the launch that did was over before the one before this began.
    if (active && t < past && !args.begins) inputs[t] = args.memory.history[t * channels + c];
  }
  device::wait_grid_dependency();
  if (!active) return;
  const Places places{args.shape, args.order};
  const float x = __ldcg(args.products + places.channel(c));
  float sum = 0;
#pragma unroll
  for (int t = 0; t < most_taps; ++t) {
    if (t > past) break;
    sum = fmaf(weights[t], t == past ? x : inputs[t], sum);
  }
  args.scratch[c] = silu_of(sum);
#pragma unroll
  for (int t = 0; t < most_taps - 1; ++t) {
    if (t < past) args.memory.history[t * channels + c] = t + 1 == past ? x : inputs[t + 1];
  }
}

__device__ float learning_rate(const float* products, const Places& places, int64_t head) {
  return 1.0f / (1.0f + expf(-__ldcg(products + places.beta(head))));
}
__device__ float decay_of(const DeltaNetArgs& args, const float* products, const Places& places, int64_t head) {
  const float step = __ldcg(products + places.decay(head)) + args.bias[head];
  return expf(-expf(args.rate[head]) * (step > 20.0f ? step : log1pf(expf(step))));
}
__device__ __half gated_output(float normed, float gate) {
  return __float2half_rn(fminf(fmaxf(normed * silu_of(gate), -65504.0f), 65504.0f));
}

/// One row. A block for each value head: threads (value channel j, slice of keys). A thread holds key_dim / slices values
/// of the state of its channel.
constexpr int slices = 4;
template <int most_keys>
__global__ void __launch_bounds__(1024) single_rule_kernel(const DeltaNetArgs args) {
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
  float state[own];  // which no launch since the last row's writes
#pragma unroll
  for (int i = 0; i < own; ++i) {
    state[i] = active && i < count && !args.begins ? memory[(first + i) * width + j] : 0.0f;
  }
  device::wait_grid_dependency();
  const float* const mixed = args.scratch;
  float q2 = 0, k2 = 0;
  for (int i = threadIdx.x; i < keys; i += blockDim.x) {
    const float q = __ldcg(mixed + from + i), k = __ldcg(mixed + shape.keys() + from + i);
    query[i] = q, key[i] = k;
    q2 += q * q, k2 += k * k;
  }
  const float q_scale = rsqrtf(block_reduce(q2, slots, 0.0f, add) + l2_eps) * rsqrtf(static_cast<float>(keys));
  const float k_scale = rsqrtf(block_reduce(k2, slots, 0.0f, add) + l2_eps);
  const float beta = learning_rate(args.products, places, head);
  const float decay = decay_of(args, args.products, places, head);
  const auto sum_of_slices = [&](float mine) {
    if (active) sums[slice * width + j] = mine;
    __syncthreads();
    float all = 0;
#pragma unroll
    for (int s = 0; s < slices; ++s) all += active ? sums[s * width + j] : 0.0f;
    __syncthreads();
    return all;
  };
  float seen = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (!active || i >= count) break;
    state[i] *= decay;
    seen = fmaf(state[i], key[first + i], seen);
  }
  seen = sum_of_slices(seen * k_scale);
  const float value = active ? __ldcg(mixed + 2 * shape.keys() + head * width + j) : 0.0f;
  const float learned = (value - seen) * beta * k_scale;
  float out = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (!active || i >= count) break;
    state[i] = fmaf(key[first + i], learned, state[i]);
    out = fmaf(state[i], query[first + i], out);
    memory[(first + i) * width + j] = state[i];
  }
  out = sum_of_slices(out * q_scale);
  const bool stores = active && slice == 0;
  const float squares = block_reduce(stores ? out * out : 0.0f, slots, 0.0f, add);
  if (!stores) return;
  const float normed = out * rsqrtf(squares / static_cast<float>(width) + args.eps) * args.norm[j];
  args.out[head * width + j] = gated_output(normed, __ldcg(args.products + places.gate(head, j)));
}

/// A warp for each key head of a row: queries and keys get length one (and queries 1/√key_dim), and the value heads that
/// read them their rates.
__global__ void prepare_kernel(const DeltaNetArgs args) {
  const Rows rows(args);
  const DeltaShape& shape = args.shape;
  const Places places{shape, args.order};
  const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (index >= args.rows * shape.key_heads) return;
  const int64_t row = index / shape.key_heads, head = index % shape.key_heads;
  float* const query = rows.mixed + row * shape.channels() + head * shape.key_dim;
  float* const key = query + shape.keys();
  const int lane = static_cast<int>(threadIdx.x % 32);
  float q2 = 0, k2 = 0;
  for (int64_t i = lane; i < shape.key_dim; i += 32) q2 += query[i] * query[i], k2 += key[i] * key[i];
  const float q_scale = rsqrtf(warp_sum(q2) + l2_eps) * rsqrtf(static_cast<float>(shape.key_dim));
  const float k_scale = rsqrtf(warp_sum(k2) + l2_eps);
  for (int64_t i = lane; i < shape.key_dim; i += 32) query[i] *= q_scale, key[i] *= k_scale;
  const float* const products = args.products + row * args.stride;
  for (int64_t each = lane; each < places.per_key(); each += 32) {
    const int64_t value_head = head * places.per_key() + each;
    float* const rates = rows.rates + (row * shape.value_heads + value_head) * 2;
    rates[0] = learning_rate(products, places, value_head);
    rates[1] = decay_of(args, products, places, value_head);
  }
}

/// Columns of the state that a warp has, and how their sums over lanes come together: lane l gets that of column_of(l).
constexpr int columns = 8;
__device__ __forceinline__ int column_of(int lane) {
  return (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
}
__device__ __forceinline__ int lane_of(int column) {
  return (column >> 2 & 1) << 4 | (column >> 1 & 1) << 3 | (column & 1) << 2;
}
__device__ __forceinline__ float sum_of_column(float (&parts)[columns], int lane) {
#pragma unroll
  for (int bit = 16, half = columns / 2; half > 0; bit /= 2, half /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keeps = upper ? parts[i + half] : parts[i], gives = upper ? parts[i] : parts[i + half];
      parts[i] = keeps + __shfl_xor_sync(0xFFFFFFFFu, gives, bit);
    }
  }
  const float sum = parts[0] + __shfl_xor_sync(0xFFFFFFFFu, parts[0], 2);
  return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
}

/// What a warp needs of a row: its lanes' queries and keys, the value of the lane's column, and the rates.
template <int own>
struct RowInputs {
  float query[own], key[own], value, beta, decay;

  __device__ __forceinline__ void load(const Rows& rows, int64_t row, int64_t head, int64_t key_head, int column) {
    const DeltaShape& shape = rows.shape;
    const float* const mixed = rows.mixed + row * shape.channels();
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int at = static_cast<int>(threadIdx.x % 32) + 32 * i;
      const bool inside = at < shape.key_dim;
      query[i] = inside ? mixed[key_head * shape.key_dim + at] : 0.0f;
      key[i] = inside ? mixed[shape.keys() + key_head * shape.key_dim + at] : 0.0f;
    }
    value = column < shape.value_dim ? mixed[2 * shape.keys() + head * shape.value_dim + column] : 0.0f;
    const float* const rates = rows.rates + (row * shape.value_heads + head) * 2;
    beta = rates[0], decay = rates[1];
  }
};

/// A warp for eight columns of a value head, from the first row to the last; lane l has keys l, l + 32, ….
template <int most_keys>
__global__ void rule_kernel(const DeltaNetArgs args) {
  constexpr int own = most_keys / 32;
  const Rows rows(args);
  const DeltaShape& shape = args.shape;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warps_of_head = (shape.value_dim + columns - 1) / columns;
  const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (index >= shape.value_heads * warps_of_head) return;
  const int64_t head = index / warps_of_head, first = index % warps_of_head * columns;
  const int64_t key_head = head / (shape.value_heads / shape.key_heads);
  const int column = static_cast<int>(first) + column_of(lane);
  float* const memory = args.memory.state + head * shape.key_dim * shape.value_dim;
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < own; ++i) {
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const int key = lane + 32 * i;
        const bool inside = key < shape.key_dim && first + c < shape.value_dim;
        use(i, c, inside ? memory + key * shape.value_dim + first + c : nullptr);
      }
    }
  };
  float state[own][columns];
  each([&](int i, int c, const float* at) { state[i][c] = at != nullptr && !args.begins ? *at : 0.0f; });
  RowInputs<own> next;
  next.load(rows, 0, head, key_head, column);
  for (int64_t row = 0; row < args.rows; ++row) {
    const RowInputs<own> now = next;
    if (row + 1 < args.rows) next.load(rows, row + 1, head, key_head, column);
    float parts[columns] = {};
#pragma unroll
    for (int i = 0; i < own; ++i) {
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        state[i][c] *= now.decay;
        parts[c] = fmaf(state[i][c], now.key[i], parts[c]);
      }
    }
    const float learned = (now.value - sum_of_column(parts, lane)) * now.beta;
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      const float mine = __shfl_sync(0xFFFFFFFFu, learned, lane_of(c));
      parts[c] = 0;
#pragma unroll
      for (int i = 0; i < own; ++i) {
        state[i][c] = fmaf(now.key[i], mine, state[i][c]);
        parts[c] = fmaf(state[i][c], now.query[i], parts[c]);
      }
    }
    const float out = sum_of_column(parts, lane);
    if (lane % 4 == 0 && column < shape.value_dim)
      rows.outs[row * shape.values() + head * shape.value_dim + column] = out;
  }
  each([&](int i, int c, float* at) {
    if (at != nullptr) *at = state[i][c];
  });
}

/// A warp for each value head of a row: the gated norm.
__global__ void finish_kernel(const DeltaNetArgs args) {
  const Rows rows(args);
  const DeltaShape& shape = args.shape;
  const Places places{shape, args.order};
  const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (index >= args.rows * shape.value_heads) return;
  const int64_t row = index / shape.value_heads, head = index % shape.value_heads;
  const int64_t at = row * shape.values() + head * shape.value_dim;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float squares = 0;
  for (int64_t j = lane; j < shape.value_dim; j += 32) squares += rows.outs[at + j] * rows.outs[at + j];
  const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(shape.value_dim) + args.eps);
  for (int64_t j = lane; j < shape.value_dim; j += 32) {
    const float gate = args.products[row * args.stride + places.gate(head, j)];
    args.out[at + j] = gated_output(rows.outs[at + j] * scale * args.norm[j], gate);
  }
}

constexpr int threads = 128;

void run_single(const DeltaNetArgs& args, const device::Stream& stream) {
  const DeltaShape& shape = args.shape;
  const int wanted = static_cast<int>(shape.value_dim) * slices;
  const LaunchShape launched{
      .grid = dim3(static_cast<unsigned>(shape.value_heads)),
      .threads = (wanted + 31) / 32 * 32,
      .shared_bytes = static_cast<size_t>(2 * shape.key_dim + slices * shape.value_dim + 32) * sizeof(float),
      .overlap = args.overlap};
  if (shape.key_dim <= 64) return launch<single_rule_kernel<64>>(launched, stream, "delta_rule", args);
  if (shape.key_dim <= 128) return launch<single_rule_kernel<128>>(launched, stream, "delta_rule", args);
  launch<single_rule_kernel<256>>(launched, stream, "delta_rule", args);
}

LaunchShape warp_for_each(int64_t count) {
  return {.grid = dim3(static_cast<unsigned>((count * 32 + threads - 1) / threads)), .threads = threads};
}

/// One row after the other.
void run_rule(const DeltaNetArgs& args, const device::Stream& stream) {
  const DeltaShape& shape = args.shape;
  const LaunchShape rule = warp_for_each(shape.value_heads * ((shape.value_dim + columns - 1) / columns));
  if (shape.key_dim <= 32) {
    launch<rule_kernel<32>>(rule, stream, "delta_rule", args);
  } else if (shape.key_dim <= 128) {
    launch<rule_kernel<128>>(rule, stream, "delta_rule", args);
  } else {
    launch<rule_kernel<256>>(rule, stream, "delta_rule", args);
  }
}

void run_many(const DeltaNetArgs& args, const device::Stream& stream) {
  const DeltaShape& shape = args.shape;
  launch<prepare_kernel>(warp_for_each(args.rows * shape.key_heads), stream, "delta_prepare", args);
  if (takes_delta_chunks(shape, args.rows)) {
    delta_chunks_cuda(args, stream);
  } else {
    run_rule(args, stream);
  }
  launch<finish_kernel>(warp_for_each(args.rows * shape.value_heads), stream, "delta_finish", args);
}

}  // namespace

bool takes_delta_net(const DeltaShape& shape) noexcept {
  return shape.key_dim <= 256 && shape.key_dim % slices == 0 && shape.value_dim * slices <= 1024 &&
         shape.value_dim >= 1 && shape.taps <= most_taps;
}

void delta_net_cuda(const DeltaNetArgs& args, const device::Stream& stream) {
  const DeltaShape& shape = args.shape;
  ensure(takes_delta_net(shape), "delta_net: heads that the kernel does not take");
  const auto blocks = static_cast<unsigned>((shape.channels() + threads - 1) / threads);
  if (args.rows == 1) {
    launch<convolve_step_kernel>({.grid = dim3(blocks), .threads = threads, .overlap = args.overlap}, stream,
                                 "delta_convolve", args);
    return run_single(args, stream);
  }
  launch<convolve_kernel>(
      {.grid = dim3(blocks, static_cast<unsigned>(args.rows)), .threads = threads, .overlap = args.overlap}, stream,
      "delta_convolve", args);
  launch<remember_kernel>({.grid = dim3(blocks), .threads = threads}, stream, "delta_remember", args);
  run_many(args, stream);
}

}  // namespace w4q::kernels
