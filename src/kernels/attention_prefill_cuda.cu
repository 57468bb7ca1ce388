// Attention of many tokens, after FlashAttention-2 (Dao 2023, arXiv 2307.08691): a block holds 64 queries of one head,
// 16 in each warp, and streams past the keys and values they see, two tiles in flight. Scores never leave the
// registers: the accumulator of a product of 16 × 8 is, rounded, the operand of the next.
//
// Shared memory: rows of 16-byte chunks, chunk c of row r at c xor (r mod 8), so that the eight rows of an ldmatrix lie
// in different banks.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "device/matrices.cuh"
#include "kernels/attention_cuda.h"
#include "kernels/overlap_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;
constexpr int query_rows = 16 * warps;
constexpr float log2_e = 1.4426950408889634f;
constexpr float lowest = -1e30f;

/// Keys of a tile: as many as leave room for two tiles in flight.
template <int dim>
constexpr int key_rows = dim == 256 ? 32 : 64;
template <int dim>
constexpr int chunks = dim / 8;
template <int dim>
constexpr int tile_bytes = key_rows<dim>* dim * 2;
template <int dim>
constexpr int shared_bytes = query_rows* dim * 2 + 4 * tile_bytes<dim>;

template <int dim>
__device__ __forceinline__ std::byte* place(std::byte* tile, int row, int chunk) {
  return tile + (row * chunks<dim> + (chunk ^ (row % 8))) * 16;
}

/// Queries of the block, zeros beyond the last row and beyond head_dim.
template <int dim>
__device__ void load_queries(const PrefillAttentionArgs& args, int64_t first_row, int head, std::byte* tile) {
  const int head_dim = args.layer.head_dim;
  const bool wide = head_dim % 8 == 0;
  for (int i = static_cast<int>(threadIdx.x); i < query_rows * chunks<dim>; i += warps * 32) {
    const int64_t row = first_row + i / chunks<dim>;
    const int d = i % chunks<dim> * 8;
    const __half* const from = args.x + (row * args.heads + head) * head_dim + d;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (row < args.rows && d < head_dim) {
      if (wide) {
        values = *reinterpret_cast<const uint4*>(from);
      } else {
        __half eight[8];
        for (int j = 0; j < 8; ++j) eight[j] = d + j < head_dim ? from[j] : __ushort_as_half(0);
        values = *reinterpret_cast<const uint4*>(eight);
      }
    }
    *reinterpret_cast<uint4*>(place<dim>(tile, i / chunks<dim>, i % chunks<dim>)) = values;
  }
}

/// Starts copying a tile of keys or values; tokens from `length` on become zeros.
template <int dim>
__device__ void fetch_tile(const PagedLayer& layer, const std::byte* pool, int64_t first, int64_t length, int kv_head,
                           std::byte* tile) {
  constexpr int page_bytes = kv_head_page_bytes(KvType::f16, dim);
  for (int i = static_cast<int>(threadIdx.x); i < key_rows<dim> * chunks<dim>; i += warps * 32) {
    const int row = i / chunks<dim>;
    const int chunk = i % chunks<dim>;
    const int64_t token = first + row;
    const bool inside = token < length;
    const int64_t index = (inside ? token : first) / kv_page_tokens;
    const int64_t page = layer.table == nullptr ? index : layer.table[index];
    const std::byte* const from =
        pool + (page * layer.kv_heads + kv_head) * page_bytes + token % kv_page_tokens * (dim * 2) + chunk * 16;
    __pipeline_memcpy_async(place<dim>(tile, row, chunk), from, 16, inside ? 0 : 16);
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

  __device__ static void scores(std::byte* queries, std::byte* keys, float (&score)[key_tiles][4]) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (auto& tile : score) tile[0] = tile[1] = tile[2] = tile[3] = 0;
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      const uint4 rows = device::load_matrices(place<dim>(queries, 16 * warp + lane % 16, 2 * step + lane / 16));
      const uint32_t a[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int pair = 0; pair < key_tiles / 2; ++pair) {
        const uint4 b =
            device::load_matrices(place<dim>(keys, 16 * pair + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
        device::HalfType::mma(score[2 * pair], a, b.x, b.y);
        device::HalfType::mma(score[2 * pair + 1], a, b.z, b.w);
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
      const float factor = exp2f(largest[half] - most);
      largest[half] = most;
      weight[half] *= factor;
#pragma unroll
      for (auto& tile : sums) tile[2 * half] *= factor, tile[2 * half + 1] *= factor;
#pragma unroll
      for (auto& tile : score) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          tile[j] = exp2f(tile[j] - most + 15);
          weight[half] += tile[j];
        }
      }
    }
  }

  __device__ void add(std::byte* values, const float (&weights)[key_tiles][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
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

  __device__ void store(const PrefillAttentionArgs& args, int64_t first_row, int head) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int head_dim = args.layer.head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = weight[half] + __shfl_xor_sync(0xFFFFFFFFu, weight[half], 1);
      all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
      const int64_t row = first_row + 16 * warp + lane / 4 + 8 * half;
      if (row >= args.rows) continue;
      __half* const to = args.x + (row * args.heads + head) * head_dim;
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
__device__ void mask(float (&score)[tiles][4], int64_t first_key, int64_t query, int64_t window) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t key = first_key + 8 * tile + 2 * (lane % 4) + j % 2;
      const int64_t at = query + lane / 4 + j / 2 * 8;
      if (key > at || (window > 0 && key <= at - window)) score[tile][j] = -INFINITY;
    }
  }
}

template <int dim>
__global__ void __launch_bounds__(warps * 32) prefill_attention_kernel(const PrefillAttentionArgs args) {
  constexpr int keys_in_tile = key_rows<dim>;
  extern __shared__ uint4 memory[];
  auto* const queries = reinterpret_cast<std::byte*>(memory);
  const auto keys = [&](int stage) { return queries + query_rows * dim * 2 + stage * 2 * tile_bytes<dim>; };
  const auto values = [&](int stage) { return keys(stage) + tile_bytes<dim>; };

  // The last queries have the most keys: they begin first.
  const int64_t first_row = int64_t{gridDim.x - 1 - blockIdx.x} * query_rows;
  const int head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (args.heads / args.layer.kv_heads);
  const int64_t first_query = args.first + first_row;
  const int64_t length = args.first + min(first_row + query_rows, args.rows);
  const int64_t oldest = args.window > 0 ? max(first_query - args.window + 1, int64_t{0}) : 0;
  const int64_t begin = oldest / keys_in_tile * keys_in_tile;
  const auto fetch = [&](int64_t first_key, int stage) {
    if (first_key < length) {
      fetch_tile<dim>(args.layer, args.layer.keys, first_key, length, kv_head, keys(stage));
      fetch_tile<dim>(args.layer, args.layer.values, first_key, length, kv_head, values(stage));
    }
    __pipeline_commit();
  };
  fetch(begin, 0);
  load_queries<dim>(args, first_row, head, queries);

  Running<dim> running;
  running.clear();
  const float factor = log2_e * rsqrtf(static_cast<float>(args.layer.head_dim));
  const int64_t warp_query = first_query + static_cast<int>(threadIdx.x) / 32 * 16;
  int stage = 0;
  for (int64_t first_key = begin; first_key < length; first_key += keys_in_tile) {
    fetch(first_key + keys_in_tile, stage ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    float score[Running<dim>::key_tiles][4];
    Running<dim>::scores(queries, keys(stage), score);
#pragma unroll
    for (auto& tile : score) tile[0] *= factor, tile[1] *= factor, tile[2] *= factor, tile[3] *= factor;
    const bool before_all = first_key + keys_in_tile - 1 <= warp_query;
    const bool in_window = args.window == 0 || first_key > warp_query + 15 - args.window;
    if (!before_all || !in_window) mask(score, first_key, warp_query, args.window);
    running.weigh(score);
    running.add(values(stage), score);
    __syncthreads();
    stage ^= 1;
  }
  running.store(args, first_row, head);
}

template <int dim>
void launch_prefill(const PrefillAttentionArgs& args, cudaStream_t stream) {
  allow_shared_memory<prefill_attention_kernel<dim>, shared_bytes<dim>>();
  const dim3 grid(static_cast<unsigned>((args.rows + query_rows - 1) / query_rows), static_cast<unsigned>(args.heads));
  launch<prefill_attention_kernel<dim>>({grid, warps * 32, shared_bytes<dim>, false}, stream, "prefill_attention",
                                        args);
}

}  // namespace

void prefill_attention_cuda(const PrefillAttentionArgs& args, cudaStream_t stream) {
  const PagedLayer& layer = args.layer;
  ensure(args.rows >= 1 && layer.kv_heads > 0 && args.heads % layer.kv_heads == 0 && layer.head_dim % 2 == 0 &&
             layer.type == KvType::f16,
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
