// Attention of one token. A block has one key head (and up to eight of the query heads that read it) and a stretch of
// pages; its warps take pages in turn, straight from global memory into registers: no shared memory, no barrier
// in the loop. Per page and warp: 2 · dim/16 mma for the scores of eight heads, dim/16 for the output. The token's own
// key and value are attended to from shared memory, so that nothing waits for their way into the cache.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "device/launch.h"
#include "kernels/attention_decode_parts.cuh"
#include "kernels/attention_pages.cuh"
#include "kernels/overlap_launch.cuh"

namespace w4q::kernels {
namespace decode {
namespace {

/// One block a multiprocessor: a page ahead in registers is worth more than more warps.
Plan plan_for(int heads, int kv_heads) {
  static const int most_blocks = device::multiprocessors();
  const int group = heads / kv_heads;
  const int head_tiles = (group + tile_heads - 1) / tile_heads;
  return {head_tiles, std::clamp(most_blocks / (kv_heads * head_tiles), 1, most_splits)};
}

/// Sums of one warp.
template <int dim>
struct Partial {
  float largest[tile_heads];  ///< score, in units of log2
  float weight[tile_heads];   ///< Σ 2^(score − largest)
  float sums[tile_heads][dim];
};

/// What the warps of a block share.
template <KvType type, int dim>
struct Shared {
  std::byte fresh[kv_head_page_bytes(type, dim) + kv_value_page_bytes(type, dim)];  ///< the token's own key and value
  float rows[warps<dim>][dim];                                                      ///< a head while it is rotated
  __half queries[tile_heads][dim];
  Partial<dim> partials[warps<dim>];
};

/// Keys and values of a page, a lane's part.
template <KvType type, int dim>
struct PageRows {
  FineKey<type, dim> keys[2];
  LaneRow<kv_value_type(type), dim, 8> values[4];

  __device__ void load(const std::byte* key_page, const std::byte* value_page) {
    using Value = LaneRow<kv_value_type(type), dim, 8>;
    constexpr int row_bytes = kv_row_bytes(kv_value_type(type), dim);
    constexpr int parameter_bytes = kv_parameter_bytes(kv_value_type(type), dim);
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    load_keys<type, dim>(key_page, keys);
    if constexpr (type == KvType::fp4r) {
      const std::byte* const rest = Fp4Row<dim>::rest_at(key_page, g, t);
      keys[0].load_rest(rest);
      keys[1].load_rest(rest + 8 * dim);
    }
    const std::byte* const codes = Value::codes_at(value_page, 2 * t, g);
    const std::byte* const parameters = Value::parameters_at(value_page, 2 * t, g);
    constexpr int slots[4] = {0, 1, 8, 9};
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i].load(codes + slots[i] * row_bytes, parameters + slots[i] * parameter_bytes);
  }
};

/// A warp's running softmax over eight heads and its sums. Lane (g, t): the softmax of head g; sums of heads 2t, 2t + 1
/// for the dims of g.
template <KvType type, int dim>
struct Running {
  using Rows = PageRows<type, dim>;
  static constexpr int steps = dim / 16;

  float largest = lowest;
  float weight = 0;  ///< the lane's share
  float sums[steps][4];

  __device__ void clear() {
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0;
  }

  /// Takes in a page; tokens that sees(token) refuses do not count.
  template <class Sees>
  __device__ void take(const QueryFragments<type, dim>& queries, Rows& rows, float factor, bool all, const Sees& sees) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    float low[4];
    float high[4];
    queries.scores(rows.keys[0], low);
    queries.scores(rows.keys[1], high);
    float score[4] = {low[0] * factor, low[1] * factor, high[0] * factor, high[1] * factor};
    if constexpr (type == KvType::fp8) {
      // Lane (g, t) has the scales of tokens g and g + 8, and scores of tokens 2t, 2t + 1 and eight further.
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] *= __shfl_sync(0xFFFFFFFFu, rows.keys[i / 2].scale, 8 * t + 4 * (i % 2));
    }
    if (!all) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (sees(2 * t + i % 2 + i / 2 * 8)) continue;
        score[i] = -INFINITY;
        rows.values[i].clear();
      }
    }
    weigh(score);
    add(rows.values, score);
  }

  __device__ void store(Partial<dim>& to) const {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    float all = weight + __shfl_xor_sync(0xFFFFFFFFu, weight, 1);
    all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
    if (t == 0) {
      to.largest[g] = largest;
      to.weight[g] = all;
    }
#pragma unroll
    for (int tile = 0; tile < steps; ++tile) {
      const int d = RowSplit<kv_value_type(type), dim, 8>::dim_of(g, tile);
      *reinterpret_cast<float2*>(&to.sums[2 * t][d]) = make_float2(sums[tile][0], sums[tile][2]);
      *reinterpret_cast<float2*>(&to.sums[2 * t + 1][d]) = make_float2(sums[tile][1], sums[tile][3]);
    }
  }

 private:
  /// Turns the scores of tokens 2t, 2t + 1, 2t + 8, 2t + 9 into their weights.
  __device__ void weigh(float (&score)[4]) {
    float most = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    const float next = fmaxf(largest, most);
    if (__any_sync(0xFFFFFFFFu, next > largest)) {
      const float factor = power_of_two(largest - next);
      weight *= factor;
      const int t = static_cast<int>(threadIdx.x) % 4;
      const float low = __shfl_sync(0xFFFFFFFFu, factor, 8 * t);
      const float high = __shfl_sync(0xFFFFFFFFu, factor, 8 * t + 4);
#pragma unroll
      for (auto& tile : sums) tile[0] *= low, tile[1] *= high, tile[2] *= low, tile[3] *= high;
      largest = next;
    }
#pragma unroll
    for (float& value : score) {
      value = power_of_two(value - largest);
      weight += value;
    }
  }

  __device__ void add(const LaneRow<kv_value_type(type), dim, 8> (&values)[4], const float (&weights)[4]) {
    const uint32_t b0 = device::HalfType::pack(weights[0] * values[0].scale, weights[1] * values[1].scale);
    const uint32_t b1 = device::HalfType::pack(weights[2] * values[2].scale, weights[3] * values[3].scale);
#pragma unroll
    for (int tile = 0; tile < steps; ++tile) {
      const uint32_t first = values[0].pair(tile), second = values[1].pair(tile);
      const uint32_t third = values[2].pair(tile), fourth = values[3].pair(tile);
      const uint32_t a[4] = {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632),
                             __byte_perm(third, fourth, 0x5410), __byte_perm(third, fourth, 0x7632)};
      device::HalfType::mma(sums[tile], a, b0, b1);
    }
  }
};

template <KvType type, int dim>
__device__ __forceinline__ float page_factor(const Task& task) {
  return type == KvType::fp4r ? score_factor(task) * Fp4Row<dim>::fine_factor : score_factor(task);
}

/// What a block attends to: pages page_of(0) … page_of(count − 1), and with `last` the token itself after them.
template <class PageOf>
struct Work {
  const Stretch& stretch;
  int kv_head, count;
  bool last;
  PageOf page_of;

  __device__ bool has(int i) const { return i < count || (last && i == count); }
};

/// Goes through items warp, warp + warps … of the work. Where registers suffice, the next one is on its
/// way while one is taken in.
template <KvType type, int dim, class PageOf>
__device__ void attend(const Task& task, const Work<PageOf>& work, const std::byte* fresh,
                       const QueryFragments<type, dim>& queries, PageRows<type, dim>& rows,
                       Running<type, dim>& running) {
  constexpr bool ahead = dim == 64 || type == KvType::q4 || (dim == 128 && type != KvType::f16);
  const float factor = page_factor<type, dim>(task);
  const auto load = [&](int i, PageRows<type, dim>& to) {
    if (i < work.count) {
      const PagePlace<type, dim> place(task, work.kv_head, work.page_of(i));
      to.load(place.keys, place.values);
    } else if (work.has(i)) {
      to.load(fresh, fresh + kv_head_page_bytes(type, dim));
    }
  };
  int i = static_cast<int>(threadIdx.x) / 32;
  if (i == work.count) load(i, rows);
  for (; work.has(i); i += warps<dim>) {
    PageRows<type, dim> next;
    if constexpr (ahead) load(i + warps<dim>, next);
    const bool is_fresh = i == work.count;
    const int index = is_fresh ? work.stretch.position / kv_page_tokens : work.page_of(i);
    running.take(queries, rows, factor, !is_fresh && work.stretch.sees_all(index), [&](int slot) {
      const int token = index * kv_page_tokens + slot;
      return is_fresh ? token == work.stretch.position : work.stretch.sees(token);
    });
    if constexpr (ahead) {
      rows = next;
    } else {
      load(i + warps<dim>, rows);
    }
  }
}

/// Dims d and d + dim/2 of a mean over tokens, and the logarithm of the tokens' weights.
struct Mean {
  float low, high, weight;
};

/// Of what the warps of the block have together.
template <int dim>
__device__ Mean block_mean(const Partial<dim> (&partials)[warps<dim>], int head, int d) {
  float largest = lowest;
#pragma unroll
  for (const auto& partial : partials) largest = fmaxf(largest, partial.largest[head]);
  float weight = 0;
  float low = 0;
  float high = 0;
#pragma unroll
  for (const auto& partial : partials) {
    const float factor = power_of_two(partial.largest[head] - largest);
    weight = fmaf(factor, partial.weight[head], weight);
    low = fmaf(factor, partial.sums[head][d], low);
    high = fmaf(factor, partial.sums[head][d + dim / 2], high);
  }
  return {__fdividef(low, weight), __fdividef(high, weight), largest + __log2f(weight)};
}

/// A mean as one word: there as a whole or not at all. Values are rounded to f16; the upper half is never zero.
__device__ __forceinline__ void send_mean(kbit::Packet* to, const Mean& mean) {
  const float weight = mean.weight == 0 ? 1e-30f : mean.weight;
  const kbit::Packet word =
      static_cast<kbit::Packet>(__float_as_uint(weight)) << 32 | device::HalfType::pack(mean.low, mean.high);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/// Joins means: a running value is divided at the end.
struct Join {
  float largest, weight, low, high;

  __device__ explicit Join(const Mean& own) : largest(own.weight), weight(1), low(own.low), high(own.high) {}

  /// The first `count` of some words, in their order.
  template <int most>
  __device__ void add(const kbit::Packet (&words)[most], int count) {
    float highest = largest;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i < count) highest = fmaxf(highest, __uint_as_float(static_cast<uint32_t>(words[i] >> 32)));
    }
    const float factor = power_of_two(largest - highest);
    largest = highest;
    weight *= factor, low *= factor, high *= factor;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= count) break;
      const float share = power_of_two(__uint_as_float(static_cast<uint32_t>(words[i] >> 32)) - highest);
      const auto bits = static_cast<uint32_t>(words[i]);
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits));
      weight += share;
      low = fmaf(share, pair.x, low);
      high = fmaf(share, pair.y, high);
    }
  }
};

/// Joins what `others` blocks sent, `stride` words apart, as it arrives: they have lower indices, and so are running or
/// done. `at_once` words are asked for together.
template <int at_once>
__device__ void join_blocks(kbit::Packet* from, int stride, int others, Join& join) {
  for (int done = 0; done < others; done += at_once) {
    kbit::Packet* const at = from + done * stride;
    const int count = others - done;
    kbit::Packet words[at_once];
    bool complete = false;
    while (!complete) {
      complete = true;
#pragma unroll
      for (int i = 0; i < at_once; ++i) words[i] = i < count ? kbit::peek(at + i * stride) : ~0ull;
#pragma unroll
      for (int i = 0; i < at_once; ++i) complete &= words[i] >> 32 != 0;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (i < count) at[i * stride] = 0;
    }
    join.add(words, count);
  }
}

/// Brings the blocks of a key head together: all but the last hand their means to it.
template <KvType type, int dim>
__device__ void merge(const Task& task, const BlockHeads& heads, int split, int active,
                      const Shared<type, dim>& shared) {
  constexpr int half = dim / 2;
  constexpr int stride = tile_heads * half;
  const int head_dim = task.layer.head_dim;
  kbit::Packet* const packets = task.packets + static_cast<int64_t>(blockIdx.y * gridDim.x) * stride;
  __half* const out = task.out + int64_t{heads.first} * head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < heads.count * half; i += threads<dim>) {
    const int head = i / half;
    const int d = i % half;
    const Mean own = block_mean<dim>(shared.partials, head, d);
    if (split + 1 < active) {
      send_mean(packets + split * stride + i, own);
      continue;
    }
    Join join(own);
    if (active <= 5) {
      join_blocks<4>(packets + i, stride, active - 1, join);
    } else {
      join_blocks<16>(packets + i, stride, active - 1, join);
    }
    if (d < head_dim) out[int64_t{head} * head_dim + d] = __float2half_rn(__fdividef(join.low, join.weight));
    if (d + half < head_dim) {
      out[int64_t{head} * head_dim + d + half] = __float2half_rn(__fdividef(join.high, join.weight));
    }
  }
}

/// Every page that the token sees.
template <KvType type, int dim>
__global__ void __launch_bounds__(threads<dim>, 1) decode_attention_kernel(const Task task) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<type, dim>*>(memory);
  device::allow_next_launch();
  const int split = static_cast<int>(blockIdx.x);
  const int splits = static_cast<int>(gridDim.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const BlockHeads heads(task);
  device::wait_for_previous_launch();
  // Of many blocks, only a long context needs the later ones.
  if (split >= certain_splits && split >= Stretch(task, read_position(task), split, splits).active) return;
  EarlyLoads<dim> early(task, heads);
  const Stretch stretch(task, read_position(task), split, splits);
  if (split >= stretch.active) return;
  const int count = stretch.past - stretch.first;
  PageRows<type, dim> rows;
  if (warp < count) {
    const PagePlace<type, dim> place(task, heads.kv_head, stretch.first + warp);
    rows.load(place.keys, place.values);
  }
  const bool last = split + 1 == stretch.active;
  prepare_heads<type, dim>(task, heads, early, stretch.position, last, shared.rows, shared.queries, shared.fresh);
  QueryFragments<type, dim> queries;
  queries.load(shared.queries);
  Running<type, dim> running;
  running.clear();
  const auto page_of = [&](int i) { return stretch.first + i; };
  attend(task, Work<decltype(page_of)>{stretch, heads.kv_head, count, last, page_of}, shared.fresh, queries, rows,
         running);
  running.store(shared.partials[warp]);
  __syncthreads();
  merge(task, heads, split, stretch.active, shared);
}

/// Pages of fp4r whose coarse scores, which score_pages_kernel left, come close enough to the largest one.
template <int dim>
__global__ void __launch_bounds__(threads<dim>, 1) pruned_attention_kernel(const Task task) {
  constexpr KvType type = KvType::fp4r;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<type, dim>*>(memory);
  __shared__ PageChoice choice;
  device::allow_next_launch();
  device::wait_for_previous_launch();
  const int split = static_cast<int>(blockIdx.x);
  const int splits = static_cast<int>(gridDim.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const BlockHeads heads(task);
  EarlyLoads<dim> early(task, heads);
  const Stretch stretch(task, read_position(task), split, splits);
  const ChosenPages chosen = choose_pages(task, heads, stretch, split, splits, choice);
  if (split >= chosen.active) return;
  const bool last = split + 1 == chosen.active;
  prepare_heads<type, dim>(task, heads, early, stretch.position, last, shared.rows, shared.queries, shared.fresh);
  QueryFragments<type, dim> queries;
  queries.load(shared.queries);
  Running<type, dim> running;
  running.clear();
  PageRows<type, dim> rows;
  for (int rank = chosen.first; rank < chosen.past; rank += listed_pages) {
    const int count = list_pages(chosen, stretch, rank, choice);
    if (warp < count) {
      const PagePlace<type, dim> place(task, heads.kv_head, choice.list[warp]);
      rows.load(place.keys, place.values);
    }
    const auto page_of = [&](int i) { return choice.list[i]; };
    const bool ends = last && rank + count == chosen.past;
    attend(task, Work<decltype(page_of)>{stretch, heads.kv_head, count, ends, page_of}, shared.fresh, queries, rows,
           running);
  }
  running.store(shared.partials[warp]);
  __syncthreads();
  merge(task, heads, split, chosen.active, shared);
}

struct Grid {
  dim3 blocks;
  bool overlap;
};

template <KvType type, int dim>
void launch_dim(const Task& task, const Grid& grid, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<type, dim>);
  if constexpr (type == KvType::fp4r) {
    launch<score_pages_kernel<dim>>({grid.blocks, threads<dim>, 0, grid.overlap}, stream, "score_pages", task);
    allow_shared_memory<pruned_attention_kernel<dim>, bytes>();
    launch<pruned_attention_kernel<dim>>({grid.blocks, threads<dim>, bytes, grid.overlap}, stream, "pruned_attention",
                                         task);
  } else {
    allow_shared_memory<decode_attention_kernel<type, dim>, bytes>();
    launch<decode_attention_kernel<type, dim>>({grid.blocks, threads<dim>, bytes, grid.overlap}, stream,
                                               "decode_attention", task);
  }
}

template <KvType type>
void launch_type(const Task& task, const Grid& grid, cudaStream_t stream) {
  switch (kv_padded_dim(task.layer.head_dim)) {
    case 64:
      return launch_dim<type, 64>(task, grid, stream);
    case 128:
      return launch_dim<type, 128>(task, grid, stream);
    default:
      return launch_dim<type, 256>(task, grid, stream);
  }
}

/// Where things stand in the workspace.
struct Workspace {
  size_t split_max, page_max, end;
  int64_t page_capacity;

  Workspace(const DecodeAttentionShape& shape, const Plan& plan) {
    const auto tiles = static_cast<size_t>(shape.kv_heads * plan.head_tiles);
    const auto splits = static_cast<size_t>(plan.splits);
    const auto round_up = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    const auto columns = static_cast<size_t>(tile_heads * kv_padded_dim(shape.head_dim) / 2);
    const bool prunes = shape.type == KvType::fp4r;
    page_capacity = (shape.capacity + kv_page_tokens - 1) / kv_page_tokens;
    split_max = round_up(tiles * splits * columns * sizeof(kbit::Packet));
    page_max = split_max + (prunes ? round_up(tiles * splits * tile_heads * sizeof(float)) : 0);
    end = page_max + (prunes ? tiles * static_cast<size_t>(page_capacity) * tile_heads * sizeof(__half) : 0);
  }
};

void check(const DecodeAttentionArgs& args) {
  const PagedLayer& layer = args.layer;
  ensure(layer.kv_heads > 0 && args.heads % layer.kv_heads == 0 && kv_padded_dim(layer.head_dim) > 0 &&
             2 * args.rotation.pairs <= layer.head_dim,
         "decode_attention: shapes do not fit");
  ensure(layer.type != KvType::fp4r || (args.capacity >= 1 && args.delta >= 0), "decode_attention: no capacity");
}

}  // namespace
}  // namespace decode

size_t decode_attention_workspace(const DecodeAttentionShape& shape) {
  if (shape.type == KvType::fp4r && shape.capacity > fp4r_most_tokens) {
    throw Error(ErrorCode::unsupported, concat("--kv fp4r with a context of ", shape.capacity, " tokens"))
        .detail(concat("pages are chosen among at most ", fp4r_most_tokens, " tokens"))
        .hint("--kv fp8 and q4 take any");
  }
  return decode::Workspace(shape, decode::plan_for(shape.heads, shape.kv_heads)).end;
}

void decode_attention_cuda(const DecodeAttentionArgs& args, cudaStream_t stream) {
  decode::check(args);
  const PagedLayer& layer = args.layer;
  const decode::Plan plan = decode::plan_for(args.heads, layer.kv_heads);
  const decode::Workspace at({args.heads, layer.kv_heads, layer.head_dim, layer.type, args.capacity}, plan);
  decode::Task task{};
  task.qkv = args.qkv;
  task.layer = layer;
  task.rotation = args.rotation;
  task.position = args.position;
  task.out = args.out;
  task.packets = reinterpret_cast<kbit::Packet*>(args.workspace);
  task.split_max = reinterpret_cast<float*>(args.workspace + at.split_max);
  task.page_max = reinterpret_cast<__half*>(args.workspace + at.page_max);
  task.page_capacity = at.page_capacity;
  task.keep_mask = args.keep_mask;
  task.kept = args.kept;
  task.margin = args.delta * decode::log2_e;
  task.window = args.window;
  task.heads = args.heads;
  task.group = args.heads / layer.kv_heads;
  task.head_tiles = plan.head_tiles;
  const decode::Grid grid{
      dim3(static_cast<unsigned>(plan.splits), static_cast<unsigned>(layer.kv_heads * plan.head_tiles)), args.overlap};
  switch (layer.type) {
    case KvType::f16:
      return decode::launch_type<KvType::f16>(task, grid, stream);
    case KvType::fp8:
      return decode::launch_type<KvType::fp8>(task, grid, stream);
    case KvType::q4:
      return decode::launch_type<KvType::q4>(task, grid, stream);
    case KvType::fp4r:
      return decode::launch_type<KvType::fp4r>(task, grid, stream);
  }
}

}  // namespace w4q::kernels
