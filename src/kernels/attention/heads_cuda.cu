#include "core/error.h"
#include "device/fragment.cuh"
#include "kernels/attention/heads_cuda.h"
#include "kernels/attention/kv_encode.cuh"
#include "kernels/common/dependent_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;
constexpr int most_dim = 512;

/// A head of a row: which, and where it comes from.
struct Head {
  bool query, key;
  int index;       ///< among those of its kind
  int64_t column;  ///< of the products
  int64_t first;   ///< the column of head 0
  int count;       ///< heads of its kind

  __device__ Head(const ArrangeHeadsArgs& args, int head) {
    query = head < args.heads;
    key = !query && head < args.heads + args.kv_heads;
    index = query ? head : key ? head - args.heads : head - args.heads - args.kv_heads;
    count = query ? args.heads : args.kv_heads;
    first = query ? 0 : key ? args.keys_at : args.values_at;
    column = first + int64_t{index} * args.head_dim;
  }
};

__device__ float sum_of_squares(const float* values, int64_t count) {
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) sum = fmaf(values[i], values[i], sum);
  return warp_sum(sum);
}

/// RMSNorm of a head, by the mean of squares of its own or of all of its kind.
__device__ void normalize(const ArrangeHeadsArgs& args, const Head& head, const float* row, float* values) {
  const float* weight = head.query ? args.rotation.q_norm : head.key ? args.rotation.k_norm : nullptr;
  if (weight == nullptr && (head.query || head.key || !args.value_norm)) return;
  const bool whole = args.whole_norms && weight != nullptr;
  const int64_t count = whole ? int64_t{head.count} * args.head_dim : args.head_dim;
  const float sum = whole ? sum_of_squares(row + head.first, count) : sum_of_squares(values, count);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(count) + args.rotation.eps);
  if (whole) weight += int64_t{head.index} * args.head_dim;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < args.head_dim; i += 32) {
    values[i] = (weight == nullptr ? 1.0f : weight[i]) * (values[i] * scale);
  }
  __syncwarp();
}

__device__ void cut_off(float limit, int head_dim, float* values) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < head_dim; i += 32) {
    values[i] = fminf(fmaxf(values[i], -limit), limit);
  }
  __syncwarp();
}

__device__ void turn(const HeadRotation& rotation, bool neighbours, int64_t row, float* values) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < rotation.pairs; i += 32) {
    const float cosine = rotation.cosine[row * rotation.pairs + i], sine = rotation.sine[row * rotation.pairs + i];
    const int low = neighbours ? 2 * i : i, high = neighbours ? 2 * i + 1 : i + rotation.pairs;
    const float a = values[low], b = values[high];
    values[low] = a * cosine - b * sine;
    values[high] = b * cosine + a * sine;
  }
  __syncwarp();
}

/// A warp for each head of a row.
__global__ void arrange_heads_kernel(const ArrangeHeadsArgs args, const PagedLayer layer) {
  __shared__ float heads[warps][most_dim];
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int all = args.heads + 2 * args.kv_heads;
  const int64_t index = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (index >= args.rows * all) return;
  const int64_t row = index / all;
  const Head head(args, static_cast<int>(index % all));
  if (head.first < 0) return;
  const int dim = kv_padded_dim(args.head_dim);
  float* const values = heads[threadIdx.x / 32];
  const float* const products = args.products + row * args.stride;
  load_head(products + head.column, args.head_dim, dim, values);
  normalize(args, head, products, values);
  if (args.clip > 0) cut_off(args.clip, args.head_dim, values);
  const int64_t further = args.position == nullptr ? 0 : *args.position;
  const int64_t position = args.first + further + row;
  if (head.query || head.key) {
    turn(args.rotation, args.neighbours, row + (args.rotation.single ? 0 : further), values);
  }
  float scale = head.query ? args.query_scale : 1.0f;
  if (head.query && args.temperature != 0) {
    scale *= 1.0f + args.temperature * logf(static_cast<float>(1 + position / args.temperature_length));
  }
  float* const out = args.out + row * all * args.head_dim + index % all * args.head_dim;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < args.head_dim; i += 32) out[i] = values[i] * scale;
  if (layer.keys != nullptr && !head.query) store_head(layer, head.key, head.index, position, dim, values);
}

constexpr int attending_warps = 8;
constexpr int tokens_at_once = 4;

/// Some tokens' part of an output, of a warp.
template <int dim>
struct Part {
  static constexpr int pairs = dim / 64;
  float2 sums[pairs] = {};
  float largest = -INFINITY, weight = 0;

  /// Scores of as many tokens, −∞ for those that are not seen, and their values.
  __device__ void add(const float (&scores)[tokens_at_once], const __half2* const (&values)[tokens_at_once]) {
    float most = largest;
#pragma unroll
    for (const float score : scores) most = fmaxf(most, score);
    if (most == -INFINITY) return;
    const float factor = expf(largest - most);
    largest = most;
    weight *= factor;
#pragma unroll
    for (auto& sum : sums) sum.x *= factor, sum.y *= factor;
#pragma unroll
    for (int token = 0; token < tokens_at_once; ++token) {
      const float share = expf(scores[token] - most);
      weight += share;
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        const float2 value = __half22float2(values[token][threadIdx.x % 32 + 32 * j]);
        sums[j].x = fmaf(share, value.x, sums[j].x);
        sums[j].y = fmaf(share, value.y, sums[j].y);
      }
    }
  }
};

template <int dim>
__global__ void __launch_bounds__(attending_warps * 32) plain_attention_kernel(const PlainAttentionArgs args) {
  constexpr int pairs = Part<dim>::pairs;
  __shared__ float2 sums[attending_warps][dim / 2];
  __shared__ float largest[attending_warps], weights[attending_warps];
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const PagedLayer& layer = args.layer;
  const int head = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int kv_head = head / (args.qkv.heads / layer.kv_heads);
  const int64_t row = blockIdx.y;
  const auto at = static_cast<int>(args.first + (args.position == nullptr ? 0 : *args.position) + row);
  const int oldest = args.window > 0 && at >= args.window ? at - static_cast<int>(args.window) + 1 : 0;
  float2 query[pairs];
  const float* const from = args.qkv.data + row * args.qkv.stride + int64_t{head} * layer.head_dim;
#pragma unroll
  for (int j = 0; j < pairs; ++j) {
    const int d = 2 * (lane + 32 * j);  // head_dim is even
    query[j] = d < layer.head_dim ? make_float2(from[d], from[d + 1]) : make_float2(0, 0);
  }
  constexpr int bytes = kv_head_page_bytes(KvType::f16, dim);
  const auto row_of = [&](std::byte* pool, int token) {
    const int page = layer.table == nullptr ? token / kv_page_tokens : layer.table[token / kv_page_tokens];
    return reinterpret_cast<const __half2*>(head_page(pool, page, layer.kv_heads, kv_head, bytes)) +
           token % kv_page_tokens * (dim / 2);
  };
  Part<dim> part;
  for (int first = oldest + warp * tokens_at_once; first <= at; first += attending_warps * tokens_at_once) {
    float scores[tokens_at_once];
    const __half2* values[tokens_at_once];
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      const int token = min(first + i, at);
      const __half2* const key = row_of(layer.keys, token);
      values[i] = row_of(layer.values, token);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        const float2 value = __half22float2(key[lane + 32 * j]);
        sum = fmaf(query[j].x, value.x, fmaf(query[j].y, value.y, sum));
      }
      scores[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      float score = warp_sum(scores[i]) * args.scale;
      if (args.soft_cap > 0) score = args.soft_cap * tanhf(score / args.soft_cap);
      scores[i] = first + i <= at ? score : -INFINITY;
    }
    part.add(scores, values);
  }
#pragma unroll
  for (int j = 0; j < pairs; ++j) sums[warp][lane + 32 * j] = part.sums[j];
  if (lane == 0) largest[warp] = part.largest, weights[warp] = part.weight;
  __syncthreads();
  const float sink = args.sinks == nullptr ? -INFINITY : args.sinks[head];
  float most = sink;
  for (const float value : largest) most = fmaxf(most, value);
  float weight = expf(sink - most);
  for (int i = 0; i < attending_warps; ++i) weight += weights[i] * expf(largest[i] - most);
  __half* const out = args.out + (row * args.qkv.heads + head) * layer.head_dim;
  for (int pair = static_cast<int>(threadIdx.x); 2 * pair < layer.head_dim; pair += attending_warps * 32) {
    float2 sum = {0, 0};
    for (int i = 0; i < attending_warps; ++i) {
      const float share = expf(largest[i] - most) / weight;
      sum.x = fmaf(share, sums[i][pair].x, sum.x);
      sum.y = fmaf(share, sums[i][pair].y, sum.y);
    }
    reinterpret_cast<__half2*>(out)[pair] = __floats2half2_rn(sum.x, sum.y);
  }
}

template <int dim>
void launch_plain(const PlainAttentionArgs& args, const device::Stream& stream) {
  const dim3 grid(static_cast<unsigned>(args.qkv.heads), static_cast<unsigned>(args.qkv.rows));
  launch<plain_attention_kernel<dim>>({grid, attending_warps * 32, 0, args.overlap}, stream, "plain_attention", args);
}

}  // namespace

void arrange_heads_cuda(const ArrangeHeadsArgs& args, const device::Stream& stream) {
  const int dim = kv_padded_dim(args.head_dim);
  ensure(args.rows >= 1 && dim > 0 && dim <= most_dim && 2 * args.rotation.pairs <= args.head_dim &&
             args.temperature_length >= 1 &&
             (args.store == nullptr || args.store->type == KvType::f16 || dim <= kv_most_dim),
         "arrange_heads: shapes do not fit");
  const int64_t items = args.rows * (args.heads + 2 * args.kv_heads);
  const LaunchShape shape{dim3(static_cast<unsigned>((items + warps - 1) / warps)), 32 * warps, 0, args.overlap};
  launch<arrange_heads_kernel>(shape, stream, "arrange_heads", args,
                               args.store == nullptr ? PagedLayer{} : *args.store);
}

void plain_attention_cuda(const PlainAttentionArgs& args, const device::Stream& stream) {
  const PagedLayer& layer = args.layer;
  ensure(args.qkv.rows >= 1 && args.qkv.rows <= 65535 && layer.kv_heads > 0 && args.qkv.heads % layer.kv_heads == 0 &&
             layer.head_dim % 2 == 0 && layer.type == KvType::f16,
         "plain_attention: shapes do not fit");
  switch (kv_padded_dim(layer.head_dim)) {
    case 64:
      return launch_plain<64>(args, stream);
    case 128:
      return launch_plain<128>(args, stream);
    case 256:
      return launch_plain<256>(args, stream);
    case 512:
      return launch_plain<512>(args, stream);
    default:
      ensure(false, "plain_attention: heads of more than 512 values");
  }
}

}  // namespace w4q::kernels
