// Attention of many tokens, after FlashAttention-2 (Dao 2023, arXiv 2307.08691): a block holds 64 queries of one head,
// 16 in each warp, and streams past the keys and values they see, two tiles in flight. Scores never leave the
// registers: the accumulator of a product of 16 × 8 is, rounded, the operand of the next.
//
// Queries are f32, and stay what they are: as two f16, each of which is multiplied with the keys. Both are registers of
// the lanes that need them, for which heads of 256 values have no room.
//
// Shared memory: rows of 16-byte chunks, chunk c of row r at c xor (r mod 8), so that the eight rows of an ldmatrix lie
// in different banks.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "device/matrices.cuh"
#include "kernels/attention/attention_cuda.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/power_of_two.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;
constexpr int query_rows = 16 * warps;
constexpr float lowest = -1e30f;

/// threadIdx.x, asked for where it is used: what follows from it is computed again for every tile, and takes no
/// registers from one to the next.
__device__ __forceinline__ int thread() {
  int x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}

/// Keys of a tile: as many as leave room for two tiles in flight.
template <int dim>
constexpr int key_rows = dim == 256 ? 16 : 64;
template <int dim>
constexpr int chunks = dim / 8;
template <int dim>
constexpr int tile_bytes = key_rows<dim>* dim * 2;
/// Queries that registers have no room for.
template <int dim>
constexpr int query_bytes = dim == 256 ? query_rows* dim * 4 : 0;
template <int dim>
constexpr int shared_bytes = query_bytes<dim> + 4 * tile_bytes<dim>;

template <int dim>
__device__ __forceinline__ std::byte* place(std::byte* tile, int row, int chunk) {
  return tile + (row * chunks<dim> + (chunk ^ (row % 8))) * 16;
}

/// A warp's 16 queries as A operands, a lane's part of them: what f16 has of their values, and of what that leaves.
template <int dim>
class Queries {
 public:
  static constexpr int steps = dim / 16;

  /// Queries times `factor`, zeros beyond the last row and beyond head_dim. `room`: query_bytes of shared memory, of
  /// which a lane reads what it wrote.
  __device__ Queries(const PrefillAttentionArgs& args, int first_row, int head, float factor, uint4* room)
      : room_(room + threadIdx.x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    const float* const from = args.qkv.data + row * args.qkv.stride + int64_t{head} * args.layer.head_dim;
    // head_dim is even: a pair is inside or outside.
    const auto pair = [&](int further, int d) {
      if (row + further >= args.qkv.rows || d >= args.layer.head_dim) return make_float2(0, 0);
      const float2 values = *reinterpret_cast<const float2*>(from + further * args.qkv.stride + d);
      return make_float2(values.x * factor, values.y * factor);
    };
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int d = 16 * step + 2 * (lane % 4);
      const float2 pairs[4] = {pair(0, d), pair(8, d), pair(0, d + 8), pair(8, d + 8)};
      store(step, pairs);
    }
  }

  __device__ void load(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
    const uint4 parts[2] = {at(2 * step), at(2 * step + 1)};
    high[0] = parts[0].x, high[1] = parts[0].y, high[2] = parts[0].z, high[3] = parts[0].w;
    low[0] = parts[1].x, low[1] = parts[1].y, low[2] = parts[1].z, low[3] = parts[1].w;
  }

 private:
  static constexpr bool in_registers = query_bytes<dim> == 0;

  __device__ void store(int step, const float2 (&pairs)[4]) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = device::HalfType::pack(pairs[i].x, pairs[i].y);
      const float2 rounded = device::HalfType::widen_pair(high[i]);
      low[i] = device::HalfType::pack(pairs[i].x - rounded.x, pairs[i].y - rounded.y);
    }
    at(2 * step) = make_uint4(high[0], high[1], high[2], high[3]);
    at(2 * step + 1) = make_uint4(low[0], low[1], low[2], low[3]);
  }
  __device__ uint4& at(int i) {
    if constexpr (in_registers) return own_[i];
    return room_[i * warps * 32];
  }

  uint4 own_[in_registers ? 2 * steps : 1];
  uint4* room_;
};

/// Where the pages of a tile stand in their pools. Asked for a tile ahead: the copies need them at once.
template <int dim>
class TilePages {
 public:
  static constexpr int count = key_rows<dim> / kv_page_tokens;

  /// Of the tile that begins with token `first`; pages behind that of `length` − 1 are that one.
  __device__ void load(const PagedLayer& layer, int first, int length) {
    const int last = (length - 1) / kv_page_tokens;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int index = min(first / kv_page_tokens + i, last);
      page_[i] = layer.table == nullptr ? index : layer.table[index];
    }
  }
  __device__ int operator[](int i) const { return page_[i]; }

 private:
  int page_[count];
};

/// Starts copying a tile of keys and values of a head, whose head page begins a pool's page at `head`; tokens from `length`
/// on become zeros.
template <int dim>
__device__ void fetch_tile(const PagedLayer& layer, int head, const TilePages<dim>& pages, int first, int length,
                           std::byte* keys, std::byte* values) {
  constexpr int rows_at_once = warps * 32 / chunks<dim>;
  static_assert(kv_page_tokens % rows_at_once == 0);
  const int row = thread() / chunks<dim>;
  const int chunk = thread() % chunks<dim>;
#pragma unroll
  for (int further = 0; further < key_rows<dim>; further += rows_at_once) {
    const int64_t page = pages[further / kv_page_tokens];
    const int64_t from = page * (layer.kv_heads * kv_head_page_bytes(KvType::f16, dim)) + head +
                         (further % kv_page_tokens + row) * (dim * 2) + chunk * 16;
    const size_t zeros = first + row + further < length ? 0 : 16;
    __pipeline_memcpy_async(place<dim>(keys, row + further, chunk), layer.keys + from, 16, zeros);
    __pipeline_memcpy_async(place<dim>(values, row + further, chunk), layer.values + from, 16, zeros);
  }
}

/// One warp's 16 queries: running softmax and sums. Lane 4 · g + t has rows g and g + 8.
template <int dim>
struct Running {
  static constexpr int key_tiles = key_rows<dim> / 8;
  float largest[2] = {lowest, lowest};
  float weight[2] = {0, 0};
  float sums[dim / 8][4];

  __device__ void clear() {
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0;
  }

  __device__ static void scores(Queries<dim>& queries, std::byte* keys, float (&score)[key_tiles][4]) {
    const int lane = thread() % 32;
#pragma unroll
    for (auto& tile : score) tile[0] = tile[1] = tile[2] = tile[3] = 0;
#pragma unroll
    for (int step = 0; step < Queries<dim>::steps; ++step) {
      uint32_t high[4], low[4];
      queries.load(step, high, low);
      // All with the one part before any with the other: a product waits for the one before it on the same sums.
      uint4 b[key_tiles / 2];
#pragma unroll
      for (int pair = 0; pair < key_tiles / 2; ++pair) {
        b[pair] =
            device::load_matrices(place<dim>(keys, 16 * pair + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
        device::HalfType::mma(score[2 * pair], high, b[pair].x, b[pair].y);
        device::HalfType::mma(score[2 * pair + 1], high, b[pair].z, b[pair].w);
      }
#pragma unroll
      for (int pair = 0; pair < key_tiles / 2; ++pair) {
        device::HalfType::mma(score[2 * pair], low, b[pair].x, b[pair].y);
        device::HalfType::mma(score[2 * pair + 1], low, b[pair].z, b[pair].w);
      }
    }
  }

  /// Scores, in units of log2, become weights: 2^15 for the largest, so that small ones are no subnormals of f16.
  __device__ void weigh(float (&score)[key_tiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (const auto& tile : score) most = fmaxf(most, fmaxf(tile[2 * half], tile[2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      const float factor = power_of_two(largest[half] - most);
      largest[half] = most;
      weight[half] *= factor;
#pragma unroll
      for (auto& tile : sums) tile[2 * half] *= factor, tile[2 * half + 1] *= factor;
#pragma unroll
      for (auto& tile : score) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          tile[j] = power_of_two(tile[j] - most + 15);
          weight[half] += tile[j];
        }
      }
    }
  }

  __device__ void add(std::byte* values, const float (&weights)[key_tiles][4]) {
    const int lane = thread() % 32;
#pragma unroll
    for (int step = 0; step < key_tiles / 2; ++step) {
      const auto& left = weights[2 * step];
      const auto& right = weights[2 * step + 1];
      const uint32_t a[4] = {device::HalfType::pack(left[0], left[1]), device::HalfType::pack(left[2], left[3]),
                             device::HalfType::pack(right[0], right[1]), device::HalfType::pack(right[2], right[3])};
#pragma unroll
      for (int pair = 0; pair < dim / 16; ++pair) {
        const uint4 b =
            device::load_matrices_transposed(place<dim>(values, 16 * step + lane % 16, 2 * pair + lane / 16));
        device::HalfType::mma(sums[2 * pair], a, b.x, b.y);
        device::HalfType::mma(sums[2 * pair + 1], a, b.z, b.w);
      }
    }
  }

  __device__ void store(const PrefillAttentionArgs& args, int first_row, int head) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int head_dim = args.layer.head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = weight[half] + __shfl_xor_sync(0xFFFFFFFFu, weight[half], 1);
      all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
      if (args.sinks != nullptr) all += exp2f(args.sinks[head] * log2_e - largest[half] + 15);
      const int64_t row = first_row + 16 * warp + lane / 4 + 8 * half;
      if (row >= args.qkv.rows) continue;
      __half* const to = args.out + (row * args.qkv.heads + head) * head_dim;
#pragma unroll
      for (int tile = 0; tile < dim / 8; ++tile) {
        const int d = 8 * tile + 2 * (lane % 4);
        // head_dim is even: a pair is inside or outside.
        if (d >= head_dim) continue;
        *reinterpret_cast<uint32_t*>(to + d) =
            device::HalfType::pack(sums[tile][2 * half] / all, sums[tile][2 * half + 1] / all);
      }
    }
  }
};

/// Scores of keys that a query does not see.
template <int tiles>
__device__ void mask(float (&score)[tiles][4], int first_key, int query, int window) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = first_key + 8 * tile + 2 * (lane % 4) + j % 2;
      const int at = query + lane / 4 + j / 2 * 8;
      if (key > at || (window > 0 && key <= at - window)) score[tile][j] = -INFINITY;
    }
  }
}

/// Blocks of a multiprocessor: what registers have room for.
template <int dim>
constexpr int blocks_at_once = dim == 64 ? 3 : 2;

template <int dim>
__global__ void __launch_bounds__(warps * 32, blocks_at_once<dim>)
    prefill_attention_kernel(const PrefillAttentionArgs args) {
  constexpr int keys_in_tile = key_rows<dim>;
  extern __shared__ uint4 memory[];
  const auto keys = [&](int stage) {
    return reinterpret_cast<std::byte*>(memory) + query_bytes<dim> + stage * 2 * tile_bytes<dim>;
  };
  const auto values = [&](int stage) { return keys(stage) + tile_bytes<dim>; };

  // The last queries have the most keys: they begin first.
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * query_rows;
  const int head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (args.qkv.heads / args.layer.kv_heads);
  const int first_query = static_cast<int>(args.first) + first_row;
  const int length = first_query + min(query_rows, static_cast<int>(args.qkv.rows) - first_row);
  const int window = args.window < length ? static_cast<int>(args.window) : 0;
  const int oldest = window > 0 ? max(first_query - window + 1, 0) : 0;
  const int begin = oldest / keys_in_tile * keys_in_tile;
  const int kv_head_at = kv_head * kv_head_page_bytes(KvType::f16, dim);
  TilePages<dim> pages;
  pages.load(args.layer, begin, length);
  const auto fetch = [&](int first_key, int stage) {
    if (first_key < length) {
      fetch_tile<dim>(args.layer, kv_head_at, pages, first_key, length, keys(stage), values(stage));
      pages.load(args.layer, first_key + keys_in_tile, length);
    }
    __pipeline_commit();
  };
  fetch(begin, 0);
  Queries<dim> queries(args, first_row, head, log2_e * rsqrtf(static_cast<float>(args.layer.head_dim)), memory);
  Running<dim> running;
  running.clear();
  const int warp_query = first_query + static_cast<int>(threadIdx.x) / 32 * 16;
  int stage = 0;
  for (int first_key = begin; first_key < length; first_key += keys_in_tile) {
    fetch(first_key + keys_in_tile, stage ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    float score[Running<dim>::key_tiles][4];
    Running<dim>::scores(queries, keys(stage), score);
    const bool before_all = first_key + keys_in_tile - 1 <= warp_query;
    const bool in_window = window == 0 || first_key > warp_query + 15 - window;
    if (!before_all || !in_window) mask(score, first_key, warp_query, window);
    running.weigh(score);
    running.add(values(stage), score);
    __syncthreads();
    stage ^= 1;
  }
  running.store(args, first_row, head);
}

template <int dim>
void launch_prefill(const PrefillAttentionArgs& args, const device::Stream& stream) {
  static_assert(shared_bytes<dim> <= least_shared_bytes);
  const QkvRows& qkv = args.qkv;
  const dim3 grid(static_cast<unsigned>((qkv.rows + query_rows - 1) / query_rows), static_cast<unsigned>(qkv.heads));
  launch<prefill_attention_kernel<dim>>({grid, warps * 32, shared_bytes<dim>, false}, stream, "prefill_attention",
                                        args);
}

}  // namespace

void prefill_attention_cuda(const PrefillAttentionArgs& args, const device::Stream& stream) {
  const PagedLayer& layer = args.layer;
  ensure(args.qkv.rows >= 1 && layer.kv_heads > 0 && args.qkv.heads % layer.kv_heads == 0 && layer.head_dim % 2 == 0 &&
             args.qkv.stride % 2 == 0 && layer.type == KvType::f16,
         "prefill_attention: shapes do not fit");
  switch (kv_padded_dim(layer.head_dim)) {
    case 64:
      return launch_prefill<64>(args, stream);
    case 128:
      return launch_prefill<128>(args, stream);
    case 256:
      return launch_prefill<256>(args, stream);
    default:
      ensure(false, "prefill_attention: heads of more than 256 values");
  }
}

}  // namespace w4q::kernels
