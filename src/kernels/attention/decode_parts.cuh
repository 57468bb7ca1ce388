// What the kernels of one token's attention share: who does what, and the token's heads on their way into shared memory
// and the cache.
#pragma once

#include <cuda_runtime.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/decode_plan.h"
#include "kernels/attention/kv_encode.cuh"
#include "kernels/common/power_of_two.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::decode {

/// Warps of a block: what registers and, for the largest heads, shared memory allow.
template <int dim>
inline constexpr int warps = dim == 256 ? 8 : 12;
template <int dim>
inline constexpr int threads = warps<dim> * 32;
/// Pages that a block takes at least, before another one joins.
inline constexpr int pages_per_split = 8;
/// Below every score, and still finite: differences of two of it are zero.
inline constexpr float lowest = -1e30f;

struct Task {
  const float* qkv;
  PagedLayer layer;
  HeadRotation rotation;
  const int32_t* position;
  const float* sinks;
  __half* out;
  frame::MailboxWord* mailboxes;  ///< [key head and tile][split][tile_heads · dim / 2]
  // fp4r
  frame::MailboxWord* kept_mailboxes;  ///< [key head and tile][split]
  uint32_t* keep_mask;                 ///< [key head and tile][mask_words], or null
  int32_t* kept;                       ///< [key head and tile], or null
  int64_t mask_words;
  float margin;  ///< in units of log2
  int64_t window;
  int heads, group, head_tiles;
};

/// The key head and the query heads of a block: a tile of heads, or one half of it.
struct BlockHeads {
  int kv_head, first, count;
  int tile;        ///< heads of the tile
  int before = 0;  ///< of which so many stand in front of these

  __device__ explicit BlockHeads(const Task& task) {
    kv_head = static_cast<int>(blockIdx.x) / task.head_tiles;
    const int index = static_cast<int>(blockIdx.x) % task.head_tiles;
    first = kv_head * task.group + index * tile_heads;
    count = tile = min(tile_heads, task.group - index * tile_heads);
  }
  /// Whether halves of the tile have columns for both parts of their queries where the tile has not.
  __device__ bool can_halve() const { return tile > tile_heads / 2; }
  __device__ void halve(bool second) {
    const int half = (tile + 1) / 2;
    before = second ? half : 0;
    count = second ? tile - half : half;
    first += before;
  }
};

/// Who shares the pages of a tile of heads: blocks blockIdx.y, or every second one of them, where two share the heads as
/// well. They do while none of them gets more pages than a block takes at least: each then has half of the heads to
/// prepare, to multiply and to bring together, and what it reads twice comes from the L2 cache.
struct Sharers {
  int first = 0, apart = 1;  ///< blocks first, first + apart …
  int split, splits;

  __device__ Sharers() : split(static_cast<int>(blockIdx.y)), splits(static_cast<int>(gridDim.y)) {}
  __device__ Sharers(const BlockHeads& heads, int pages) : Sharers() {
    if (!heads.can_halve() || pages > pages_per_split * (splits / 2)) return;
    first = split % 2, apart = 2;
    split /= 2, splits /= 2;
  }
  /// The index of the block that has this split.
  __device__ int block(int of) const { return first + of * apart; }
};

/// Tokens that count, oldest … position, and the pages that have some.
struct SeenPages {
  int position, oldest, begin, pages;

  __device__ SeenPages(const Task& task, int position_) : position(position_) {
    oldest = task.window > 0 && position >= task.window ? position - static_cast<int>(task.window) + 1 : 0;
    begin = oldest / kv_page_tokens;
    pages = position / kv_page_tokens + 1 - begin;
  }
};

/// The stretch of pages of a block.
struct Stretch : SeenPages {
  int active;       ///< blocks of these heads that have pages
  int first, past;  ///< pages of this block

  __device__ Stretch(const SeenPages& seen, int split, int splits) : SeenPages(seen) {
    active = min(splits, (pages + pages_per_split - 1) / pages_per_split);
    const int each = (pages + active - 1) / active;
    active = (pages + each - 1) / each;
    first = begin + min(split * each, pages);
    past = begin + min((split + 1) * each, pages);
  }
  __device__ bool sees(int token) const { return token >= oldest && token < position; }
};

/// The position as it stands now, which a constant would not be.
__device__ __forceinline__ int read_position(const Task& task) {
  int position;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(position) : "l"(task.position) : "memory");
  return position;
}

/// One block brings the table of pages into the L2 cache, for which all would wait after they know the position.
__device__ __forceinline__ void prefetch_table(const PagedLayer& layer) {
  constexpr int entries = 32;  // of a line
  if (blockIdx.x + blockIdx.y != 0) return;
  for (int i = static_cast<int>(threadIdx.x) * entries; i < layer.table_pages;
       i += static_cast<int>(blockDim.x) * entries)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.table + i));
}

/// Brings the block's sinks to the L2 cache: they come in when sums are joined.
__device__ __forceinline__ void prefetch_sinks(const Task& task, const BlockHeads& heads) {
  if (task.sinks == nullptr || static_cast<int>(threadIdx.x) >= heads.tile) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(task.sinks + heads.first + threadIdx.x));
}

/// A query head of the tile, or the key or value head of the token: which, and where it stands.
struct Item {
  bool query, key;
  int head;  ///< in the row of q, k and v heads

  __device__ Item(const Task& task, const BlockHeads& heads, int index) {
    query = index < heads.tile;
    key = index == heads.tile;
    head = query ? heads.first - heads.before + index : task.heads + (key ? 0 : task.layer.kv_heads) + heads.kv_head;
  }
};

/// The weights of a head's norm, a lane's.
template <int dim>
struct HeadNorm {
  const float* from = nullptr;  ///< null: it has none
  float weights[dim / 32];

  __device__ HeadNorm(const Task& task, const Item& item) {
    if (item.query || item.key) from = item.query ? task.rotation.q_norm : task.rotation.k_norm;
    if (from == nullptr) return;
#pragma unroll
    for (int j = 0; j < dim / 32; ++j) {
      const int i = static_cast<int>(threadIdx.x) % 32 + 32 * j;
      weights[j] = i < task.layer.head_dim ? __ldg(from + i) : 0.0f;
    }
  }
};

/// A head of the token, a lane's values: as it comes, and with its norm.
template <int dim>
struct RawHead {
  float values[dim / 32];

  RawHead() = default;
  __device__ RawHead(const Task& task, const Item& item) {
    const float* const from = task.qkv + int64_t{item.head} * task.layer.head_dim;
#pragma unroll
    for (int j = 0; j < dim / 32; ++j) {
      const int i = static_cast<int>(threadIdx.x) % 32 + 32 * j;
      values[j] = i < task.layer.head_dim ? from[i] : 0.0f;
    }
  }
  /// By the whole warp.
  __device__ void normalize(const Task& task, const HeadNorm<dim>& norm) {
    if (norm.from == nullptr) return;
    float sum = 0;
#pragma unroll
    for (const float value : values) sum = fmaf(value, value, sum);
    const float mean = warp_sum(sum) / static_cast<float>(task.layer.head_dim);
    const float scale = 1.0f / sqrtf(mean + task.rotation.eps);
#pragma unroll
    for (int j = 0; j < dim / 32; ++j) values[j] = norm.weights[j] * (values[j] * scale);
  }
};

/// What a warp asks for of its first head of the tile, whoever has that in the end: where the token is stored and the
/// weights of the head's norm, which the stream of all weights pushes out of the L2 cache from one token to the next, as
/// soon as it can; then the head and the angles, where they do not depend on the position.
template <int dim>
struct EarlyLoads {
  Item item;
  HeadNorm<dim> norm;
  RawHead<dim> head;
  Angles<dim> angles;
  int place;  ///< of the token's page in the pool

  __device__ EarlyLoads(const Task& task, const BlockHeads& heads)
      : item(task, heads, min(static_cast<int>(threadIdx.x) / 32, heads.tile + 1)), norm(task, item) {}
  __device__ void look_up(const Task& task, int position) { place = task.layer.table[position / kv_page_tokens]; }
  /// Once q, k and v are there.
  __device__ void ask(const Task& task) {
    head = RawHead<dim>(task, item);
    if (task.rotation.single) angles = Angles<dim>(task.rotation.cosine, task.rotation.sine, task.rotation.pairs);
  }
};

/// A query in shared memory; what is behind it keeps lanes that read eight of them out of each other's banks.
template <int dim>
struct alignas(16) QueryRow {
  __half values[dim];
  __half unused[32];

  __device__ __half& operator[](int i) { return values[i]; }
  __device__ const __half& operator[](int i) const { return values[i]; }
};

/// Queries that meet keys of f16 are two f16: what one has of them, and of what that leaves.
inline constexpr bool has_low_parts(KvType type) { return type == KvType::f16; }
template <KvType type>
inline constexpr int query_rows = has_low_parts(type) ? 2 * tile_heads : tile_heads;
/// The row of the low part of the first head: columns of an mma that other heads leave are theirs.
__device__ __forceinline__ int low_parts_at(int heads) { return heads <= tile_heads / 2 ? tile_heads / 2 : tile_heads; }

/// The token's heads: those that the block's queries are go into shared memory, and with `stores` its key and value
/// into the cache and `fresh`, a head page of keys and one of values. `row` is room for a head, the warp's own.
template <KvType type, int dim>
__device__ void prepare_heads(const Task& task, const BlockHeads& heads, EarlyLoads<dim>& early, int position,
                              bool stores, float* row, QueryRow<dim> (&queries)[query_rows<type>], std::byte* fresh) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const HeadRotation& rotation = task.rotation;
  const int low_at = has_low_parts(type) ? low_parts_at(heads.count) : tile_heads;
  if (!rotation.single) {
    const int64_t at = int64_t{position} * rotation.pairs;
    early.angles = Angles<dim>(rotation.cosine + at, rotation.sine + at, rotation.pairs);
  }
  for (int index = warp; index < heads.tile + (stores ? 2 : 0); index += warps<dim>) {
    const Item item(task, heads, index);
    const int query = index - heads.before;  // of the block
    if (item.query && static_cast<unsigned>(query) >= static_cast<unsigned>(heads.count)) continue;
    if (index != warp) early.norm = HeadNorm<dim>(task, item), early.head = RawHead<dim>(task, item);
    early.head.normalize(task, early.norm);
#pragma unroll
    for (int j = 0; j < dim / 32; ++j) row[lane + 32 * j] = early.head.values[j];
    __syncwarp();
    if (item.query || item.key) {
      rotate_head(row, early.angles, rotation.pairs);
      if (type == KvType::q4 && kv_transforms_keys(task.layer.type)) transform_head<dim>(row, dim);
    }
    if (item.query) {
      for (int i = lane; i < dim; i += 32) {
        const __half high = __float2half_rn(row[i]);
        queries[query][i] = high;
        if constexpr (has_low_parts(type)) queries[low_at + query][i] = __float2half_rn(row[i] - __half2float(high));
      }
    } else {
      const int bytes = item.key ? kv_head_page_bytes(type, dim) : kv_value_page_bytes(type, dim);
      std::byte* const page = head_page(item.key ? task.layer.keys : task.layer.values, early.place,
                                        task.layer.kv_heads, heads.kv_head, bytes);
      std::byte* const own = fresh + (item.key ? 0 : kv_head_page_bytes(type, dim));
      encode_row(type, item.key, row, dim, position % kv_page_tokens, {page, own});
    }
    __syncwarp();
  }
  for (int part = 0; part < query_rows<type> / tile_heads; ++part) {
    for (int i = static_cast<int>(threadIdx.x) + heads.count * dim; i < low_at * dim; i += threads<dim>) {
      queries[part * low_at + i / dim][i % dim] = __ushort_as_half(0);
    }
  }
  __syncthreads();
}

/// Scores become units of log2.
__device__ __forceinline__ float score_factor(const Task& task) {
  return log2_e * rsqrtf(static_cast<float>(task.layer.head_dim));
}

}  // namespace w4q::kernels::decode
