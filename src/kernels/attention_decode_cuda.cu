// Attention of one token. A block has one key head (and up to eight of the query heads that read it) and a stretch of
// pages; its eight warps take pages in turn, straight from global memory into registers: no shared memory, no barrier
// in the loop. Per page and warp: 2 · dim/16 mma for the scores of eight heads, dim/16 for the output.
#include <algorithm>

#include "core/error.h"
#include "device/fragment.cuh"
#include "device/launch.h"
#include "kernels/attention_cuda.h"
#include "kernels/kv_encode.cuh"
#include "kernels/kv_fragments.cuh"
#include "kernels/overlap_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 8;
constexpr int tile_heads = 8;  ///< query heads of a block: the columns of an mma
/// Pages that a block takes at least, before another one joins.
constexpr int pages_per_split = warps;
constexpr int most_splits = 64;
constexpr float log2_e = 1.4426950408889634f;
/// Below every score, and still finite: differences of two of it are zero.
constexpr float lowest = -1e30f;

struct Plan {
  int head_tiles, splits;
};
Plan plan_for(int heads, int kv_heads) {
  static const int most_blocks = 2 * device::multiprocessors();
  const int group = heads / kv_heads;
  const int head_tiles = (group + tile_heads - 1) / tile_heads;
  return {head_tiles, std::clamp(most_blocks / (kv_heads * head_tiles), 1, most_splits)};
}

/// Sums of one stretch of pages, in the workspace.
template <int dim>
struct Partial {
  float largest[tile_heads];  ///< score, in units of log2
  float weight[tile_heads];   ///< Σ 2^(score − largest)
  float sums[tile_heads][dim];
};

size_t counters_bytes(int blocks) { return (static_cast<size_t>(blocks) * 4 + 255) / 256 * 256; }

struct Task {
  const __half* qkv;
  PagedLayer layer;
  HeadRotation rotation;
  const int32_t* position;
  __half* out;
  unsigned* counters;  ///< per key head and tile: blocks that are done
  std::byte* partials;
  int64_t window;
  int heads, group, head_tiles;
};

/// What the warps of a block share.
template <int dim>
struct Shared {
  float rows[warps][dim];  ///< a head while it is rotated
  __half queries[tile_heads][dim];
  Partial<dim> partials[warps];
};

/// A warp's running softmax over eight heads and its sums. Lane (g, t): the softmax of head g; sums of heads 2t, 2t + 1
/// for the dims of g.
template <KvType type, int dim>
struct Running {
  using Keys = LaneRow<type, dim, 4>;
  using Values = LaneRow<type, dim, 8>;
  static constexpr int steps = dim / 16;

  float largest = lowest;
  float weight = 0;  ///< the lane's share
  float sums[steps][4];

  __device__ void clear() {
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0;
  }

  __device__ static void scores(const uint32_t (&queries)[steps][2], const Keys& keys, float (&c)[4]) {
    c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint32_t a[4] = {queries[step][0], 0, queries[step][1], 0};
      device::HalfType::mma(c, a, keys.pair(2 * step), keys.pair(2 * step + 1));
    }
  }

  /// Takes in the scores of tokens 2t, 2t + 1, 2t + 8, 2t + 9 and returns their weights.
  __device__ void weigh(float (&score)[4]) {
    float most = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    const float next = fmaxf(largest, most);
    if (__any_sync(0xFFFFFFFFu, next > largest)) {
      const float factor = exp2f(largest - next);
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
      value = exp2f(value - largest);
      weight += value;
    }
  }

  __device__ void add(const Values (&values)[4], const float (&weights)[4]) {
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
      const int d = RowSplit<type, dim, 8>::dim_of(g, tile);
      to.sums[2 * t][d] = sums[tile][0];
      to.sums[2 * t + 1][d] = sums[tile][1];
      to.sums[2 * t][d + 1] = sums[tile][2];
      to.sums[2 * t + 1][d + 1] = sums[tile][3];
    }
  }
};

/// The stretch of pages of a block.
struct Stretch {
  int position, oldest;  ///< tokens that count: oldest … position
  int first, past;       ///< pages of this block
  int active;            ///< blocks of this key head that have pages

  __device__ Stretch(const Task& task, int split, int splits) : position(*task.position) {
    oldest = task.window > 0 && position >= task.window ? position - static_cast<int>(task.window) + 1 : 0;
    const int begin = oldest / kv_page_tokens;
    const int pages = position / kv_page_tokens + 1 - begin;
    active = min(splits, (pages + pages_per_split - 1) / pages_per_split);
    const int each = (pages + active - 1) / active;
    active = (pages + each - 1) / each;
    first = begin + min(split * each, pages);
    past = begin + min((split + 1) * each, pages);
  }
};

/// Asks for a warp's first page, so that it comes while heads are rotated.
template <KvType type, int dim>
__device__ void prefetch_page(const Task& task, const Stretch& stretch, int kv_head) {
  constexpr int page_bytes = kv_head_page_bytes(type, dim);
  const int index = stretch.first + static_cast<int>(threadIdx.x) / 32;
  if (index >= stretch.past) return;
  const int64_t page = task.layer.table[index];
  for (int at = static_cast<int>(threadIdx.x) % 32 * 128; at < page_bytes; at += 32 * 128) {
    for (std::byte* pool : {task.layer.keys, task.layer.values}) {
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(head_page(pool, page, task.layer.kv_heads, kv_head, page_bytes) + at));
    }
  }
}

/// Puts the tile's query heads into shared memory, and the token's key and value into the cache where the block has
/// its page.
template <KvType type, int dim>
__device__ void prepare(const Task& task, const Stretch& stretch, int kv_head, int head_tile, Shared<dim>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head_dim = task.layer.head_dim;
  const HeadRotation& rotation = task.rotation;
  const int64_t angles_at = int64_t{stretch.position} * rotation.pairs;
  const Angles<dim> angles(rotation.cosine + angles_at, rotation.sine + angles_at, rotation.pairs);
  float* const row = shared.rows[warp];
  const int first_head = kv_head * task.group + head_tile * tile_heads;
  const int queries = min(tile_heads, task.group - head_tile * tile_heads);
  const bool stores = stretch.past * kv_page_tokens > stretch.position;
  // Items: the query heads, the key, the value.
  for (int item = warp; item < queries + (stores ? 2 : 0); item += warps) {
    const bool query = item < queries;
    const bool key = item == queries;
    const int head = query ? first_head + item : task.heads + (key ? 0 : task.layer.kv_heads) + kv_head;
    load_head(task.qkv + int64_t{head} * head_dim, head_dim, dim, row);
    if (query || key) {
      normalize_head(row, query ? rotation.q_norm : rotation.k_norm, head_dim, rotation.eps);
      rotate_head(row, angles, rotation.pairs);
    }
    if (query) {
      for (int i = lane; i < dim; i += 32) shared.queries[item][i] = __float2half_rn(row[i]);
    } else {
      std::byte* const page =
          head_page(key ? task.layer.keys : task.layer.values, task.layer.table[stretch.position / kv_page_tokens],
                    task.layer.kv_heads, kv_head, kv_head_page_bytes(type, dim));
      encode_row(type, row, dim, page, stretch.position % kv_page_tokens);
    }
    __syncwarp();
  }
  for (int i = static_cast<int>(threadIdx.x) + queries * dim; i < tile_heads * dim; i += warps * 32) {
    shared.queries[i / dim][i % dim] = __ushort_as_half(0);
  }
  __syncthreads();
}

template <KvType type, int dim>
__device__ void attend(const Task& task, const Stretch& stretch, int kv_head, const Shared<dim>& shared,
                       Running<type, dim>& running) {
  using Run = Running<type, dim>;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  uint32_t queries[Run::steps][2];
#pragma unroll
  for (int step = 0; step < Run::steps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = RowSplit<type, dim, 4>::dim_of(t, 2 * step + half);
      queries[step][half] = *reinterpret_cast<const uint32_t*>(&shared.queries[g][d]);
    }
  }
  const float factor = log2_e * rsqrtf(static_cast<float>(task.layer.head_dim));
  constexpr int page_bytes = kv_head_page_bytes(type, dim);
  for (int index = stretch.first + warp; index < stretch.past; index += warps) {
    const int64_t page = task.layer.table[index];
    const std::byte* const key_page = head_page(task.layer.keys, page, task.layer.kv_heads, kv_head, page_bytes);
    const std::byte* const value_page = head_page(task.layer.values, page, task.layer.kv_heads, kv_head, page_bytes);
    typename Run::Keys keys[2];
    typename Run::Values values[4];
    keys[0].load(key_page, g, t);
    keys[1].load(key_page, g + 8, t);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i].load(value_page, 2 * t + i % 2 + i / 2 * 8, g);
    float low[4];
    float high[4];
    Run::scores(queries, keys[0], low);
    Run::scores(queries, keys[1], high);
    float score[4] = {low[0] * factor, low[1] * factor, high[0] * factor, high[1] * factor};
    if constexpr (type == KvType::fp8) {
      // Lane (g, t) has the scales of tokens g and g + 8, and scores of tokens 2t, 2t + 1 and eight further.
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] *= __shfl_sync(0xFFFFFFFFu, keys[i / 2].scale, 8 * t + 4 * (i % 2));
    }
    const int token = index * kv_page_tokens;
    if (token < stretch.oldest || token + kv_page_tokens - 1 > stretch.position) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = token + 2 * t + i % 2 + i / 2 * 8;
        const bool seen = at >= stretch.oldest && at <= stretch.position;
        if (!seen) score[i] = -INFINITY;
        if (!seen) values[i].clear();
      }
    }
    running.weigh(score);
    running.add(values, score);
  }
}

/// use(head, dim, largest, weight, sum) for what the block's warps have together.
template <int dim, class Use>
__device__ void merge_warps(const Shared<dim>& shared, int heads, const Use& use) {
  for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += warps * 32) {
    const int head = i / dim;
    const int d = i % dim;
    float largest = lowest;
#pragma unroll
    for (const auto& partial : shared.partials) largest = fmaxf(largest, partial.largest[head]);
    float weight = 0;
    float sum = 0;
#pragma unroll
    for (const auto& partial : shared.partials) {
      const float factor = exp2f(partial.largest[head] - largest);
      weight = fmaf(factor, partial.weight[head], weight);
      sum = fmaf(factor, partial.sums[head][d], sum);
    }
    use(head, d, largest, weight, sum);
  }
}

/// Adds up `count` partial results of other blocks in their order and stores the quotients. `factors` is shared memory,
/// most_splits × tile_heads.
template <int dim>
__device__ void merge_blocks(const Partial<dim>* partials, int count, int heads, float* factors, int head_dim,
                             __half* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = static_cast<int>(threadIdx.x) / 32; head < heads; head += warps) {
    const auto largest_of = [&](int p) { return p < count ? __ldcg(&partials[p].largest[head]) : lowest; };
    const auto weight_of = [&](int p) { return p < count ? __ldcg(&partials[p].weight[head]) : 0.0f; };
    static_assert(most_splits == 64);
    const float first = largest_of(lane), second = largest_of(lane + 32);
    const float first_weight = weight_of(lane), second_weight = weight_of(lane + 32);
    const float largest = warp_max(fmaxf(first, second));
    const float first_factor = exp2f(first - largest), second_factor = exp2f(second - largest);
    const float weight = warp_sum(fmaf(first_factor, first_weight, second_factor * second_weight));
    factors[lane * tile_heads + head] = first_factor / weight;
    factors[(lane + 32) * tile_heads + head] = second_factor / weight;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x) * 4; i < heads * dim; i += warps * 32 * 4) {
    const int head = i / dim;
    const int d = i % dim;
    float sum[4] = {};
#pragma unroll 8
    for (int p = 0; p < count; ++p) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(&partials[p].sums[head][d]));
      const float factor = factors[p * tile_heads + head];
      sum[0] = fmaf(factor, part.x, sum[0]), sum[1] = fmaf(factor, part.y, sum[1]);
      sum[2] = fmaf(factor, part.z, sum[2]), sum[3] = fmaf(factor, part.w, sum[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (d + j < head_dim) out[int64_t{head} * head_dim + d + j] = __float2half_rn(sum[j]);
    }
  }
}

/// True in the block that is the last of `expected` to come here; all that the others wrote is then visible.
__device__ bool arrive_last(unsigned* counter, unsigned expected) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) + 1 == expected;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <KvType type, int dim>
__global__ void __launch_bounds__(warps * 32) decode_attention_kernel(const Task task) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<dim>*>(memory);
  device::allow_next_launch();
  device::wait_for_previous_launch();
  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y) / task.head_tiles;
  const int head_tile = static_cast<int>(blockIdx.y) % task.head_tiles;
  const Stretch stretch(task, split, static_cast<int>(gridDim.x));
  if (split >= stretch.active) return;
  prefetch_page<type, dim>(task, stretch, kv_head);
  prepare<type>(task, stretch, kv_head, head_tile, shared);
  Running<type, dim> running;
  running.clear();
  attend(task, stretch, kv_head, shared, running);
  running.store(shared.partials[threadIdx.x / 32]);
  __syncthreads();
  const int heads = min(tile_heads, task.group - head_tile * tile_heads);
  const int head_dim = task.layer.head_dim;
  __half* const out = task.out + int64_t{kv_head * task.group + head_tile * tile_heads} * head_dim;
  if (stretch.active == 1) {
    merge_warps(shared, heads, [&](int head, int d, float, float weight, float sum) {
      if (d < head_dim) out[int64_t{head} * head_dim + d] = __float2half_rn(sum / weight);
    });
    return;
  }
  auto* const partials = reinterpret_cast<Partial<dim>*>(task.partials) + blockIdx.y * gridDim.x;
  merge_warps(shared, heads, [&](int head, int d, float largest, float weight, float sum) {
    partials[split].sums[head][d] = sum;
    if (d != 0) return;
    partials[split].largest[head] = largest;
    partials[split].weight[head] = weight;
  });
  if (!arrive_last(task.counters + blockIdx.y, static_cast<unsigned>(stretch.active))) return;
  merge_blocks(partials, stretch.active, heads, reinterpret_cast<float*>(shared.partials), head_dim, out);
}

template <KvType type, int dim>
void launch_decode(const Task& task, const Plan& plan, bool overlap, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<dim>);
  allow_shared_memory<decode_attention_kernel<type, dim>, bytes>();
  const dim3 grid(static_cast<unsigned>(plan.splits), static_cast<unsigned>(task.layer.kv_heads * plan.head_tiles));
  launch<decode_attention_kernel<type, dim>>({grid, warps * 32, bytes, overlap}, stream, "decode_attention", task);
}

template <KvType type>
void launch_type(const Task& task, const Plan& plan, bool overlap, cudaStream_t stream) {
  switch (kv_padded_dim(task.layer.head_dim)) {
    case 64:
      return launch_decode<type, 64>(task, plan, overlap, stream);
    case 128:
      return launch_decode<type, 128>(task, plan, overlap, stream);
    default:
      return launch_decode<type, 256>(task, plan, overlap, stream);
  }
}

size_t partial_bytes(int64_t head_dim) {
  const int dim = kv_padded_dim(head_dim);
  return dim == 64 ? sizeof(Partial<64>) : dim == 128 ? sizeof(Partial<128>) : sizeof(Partial<256>);
}

}  // namespace

size_t decode_attention_workspace(int heads, int kv_heads, int64_t head_dim) {
  const Plan plan = plan_for(heads, kv_heads);
  const int blocks = kv_heads * plan.head_tiles;
  return counters_bytes(blocks) +
         static_cast<size_t>(blocks) * static_cast<size_t>(plan.splits) * partial_bytes(head_dim);
}

void decode_attention_cuda(const DecodeAttentionArgs& args, cudaStream_t stream) {
  const PagedLayer& layer = args.layer;
  ensure(layer.kv_heads > 0 && args.heads % layer.kv_heads == 0 && kv_padded_dim(layer.head_dim) > 0 &&
             2 * args.rotation.pairs <= layer.head_dim,
         "decode_attention: shapes do not fit");
  const Plan plan = plan_for(args.heads, layer.kv_heads);
  Task task{};
  task.qkv = args.qkv;
  task.layer = layer;
  task.rotation = args.rotation;
  task.position = args.position;
  task.out = args.out;
  task.counters = reinterpret_cast<unsigned*>(args.workspace);
  task.partials = args.workspace + counters_bytes(layer.kv_heads * plan.head_tiles);
  task.window = args.window;
  task.heads = args.heads;
  task.group = args.heads / layer.kv_heads;
  task.head_tiles = plan.head_tiles;
  switch (layer.type) {
    case KvType::f16:
      return launch_type<KvType::f16>(task, plan, args.overlap, stream);
    case KvType::fp8:
      return launch_type<KvType::fp8>(task, plan, args.overlap, stream);
    case KvType::q4:
      return launch_type<KvType::q4>(task, plan, args.overlap, stream);
  }
}

}  // namespace w4q::kernels
