// Which pages of an fp4r cache a token attends to. One launch scores all pages by their E2M1 codes alone; the next one
// keeps those of which some query head's largest score is at most a margin below the head's largest of all. What is
// kept depends on nothing but the cache and the queries: it is the same from run to run.
#pragma once

#include "kernels/attention_decode_parts.cuh"

namespace w4q::kernels::decode {

/// Scores every page: per query head the largest of its tokens' coarse scores, in units of log2, and the largest of the
/// block's pages.
template <int dim>
__global__ void __launch_bounds__(threads<dim>, 1) score_pages_kernel(const Task task) {
  constexpr KvType type = KvType::fp4r;
  __shared__ float rows[warps<dim>][dim];
  __shared__ __half queries_of_block[tile_heads][dim];
  __shared__ float largest_of[warps<dim>][tile_heads];
  device::allow_next_launch();
  device::wait_for_previous_launch();
  const int split = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const BlockHeads heads(task);
  EarlyLoads<dim> early(task, heads);
  const Stretch stretch(task, read_position(task), split, static_cast<int>(gridDim.x));
  if (split >= stretch.active) return;
  using Place = PagePlace<type, dim>;
  CoarseKey<dim> keys[2];
  const auto load = [&](int index) { load_keys<type, dim>(Place(task, heads.kv_head, index).keys, keys); };
  int index = stretch.first + warp;
  if (index < stretch.past) load(index);
  prepare_heads<type, dim>(task, heads, early, stretch.position, false, rows, queries_of_block, nullptr);
  QueryFragments<type, dim> queries;
  queries.load(queries_of_block);
  const float factor = score_factor(task) * Fp4Row<dim>::coarse_factor;
  __half* const page_max = task.page_max + int64_t{blockIdx.y} * task.page_capacity * tile_heads;
  float largest = lowest;
  for (; index < stretch.past; index += warps<dim>) {
    CoarseKey<dim> now[2] = {keys[0], keys[1]};
    if (index + warps<dim> < stretch.past) load(index + warps<dim>);
    float low[4];
    float high[4];
    queries.scores(now[0], low);
    queries.scores(now[1], high);
    float score[4] = {low[0] * factor, low[1] * factor, high[0] * factor, high[1] * factor};
    if (!stretch.sees_all(index)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!stretch.sees(index * kv_page_tokens + 2 * t + i % 2 + i / 2 * 8)) score[i] = -INFINITY;
      }
    }
    float most = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    largest = fmaxf(largest, most);
    if (t == 0) page_max[int64_t{index - stretch.begin} * tile_heads + g] = __float2half_rn(most);
  }
  if (t == 0) largest_of[warp][g] = largest;
  __syncthreads();
  if (threadIdx.x >= tile_heads) return;
#pragma unroll
  for (const auto& of_warp : largest_of) largest = fmaxf(largest, of_warp[threadIdx.x]);
  task.split_max[(blockIdx.y * gridDim.x + blockIdx.x) * tile_heads + threadIdx.x] = largest;
}

/// Pages whose numbers are held at a time.
inline constexpr int listed_pages = 512;
inline constexpr int most_warps = 16;

struct PageChoice {
  float threshold[tile_heads];
  uint32_t bits[fp4r_most_tokens / kv_page_tokens / 32];
  int before[most_warps];  ///< kept pages of the warps before
  int list[listed_pages];
};

/// Ranks, among the kept pages, of those of a block.
struct ChosenPages {
  int first, past;
  int active;         ///< blocks of this key head that have pages
  int thread_before;  ///< kept pages ahead of this thread's words
  int thread_words;
};

/// The whole block together. Page 0 and the newest one are always kept.
__device__ inline ChosenPages choose_pages(const Task& task, const BlockHeads& heads, const Stretch& stretch, int split,
                                           int splits, PageChoice& choice) {
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < tile_heads) {
    const float* const maxima = task.split_max + blockIdx.y * gridDim.x * tile_heads + warp;
    float largest = lowest;
    for (int p = lane; p < stretch.active; p += 32) largest = fmaxf(largest, __ldcg(maxima + p * tile_heads));
    largest = warp_max(largest);
    // Scores of pages are rounded to f16; a margin may be infinite.
    if (lane == 0) choice.threshold[warp] = largest - task.margin - fabsf(largest) * 0x1p-10f;
  }
  __syncthreads();
  const __half* const page_max = task.page_max + int64_t{blockIdx.y} * task.page_capacity * tile_heads;
  const int words = (stretch.pages + 31) / 32;
#pragma unroll 4
  for (int word = warp; word < words; word += warps) {
    const int page = word * 32 + lane;
    bool keep = page == 0 || page == stretch.pages - 1;
    if (page < stretch.pages) {
      const uint4 maxima = __ldcg(reinterpret_cast<const uint4*>(page_max) + page);
      const uint32_t pairs[4] = {maxima.x, maxima.y, maxima.z, maxima.w};
#pragma unroll
      for (int h = 0; h < tile_heads; ++h) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[h / 2]));
        keep |= h < heads.count && (h % 2 == 0 ? pair.x : pair.y) >= choice.threshold[h];
      }
    }
    const uint32_t bits = __ballot_sync(0xFFFFFFFFu, keep);
    if (lane == 0) choice.bits[word] = bits;
  }
  __syncthreads();
  ChosenPages chosen{};
  chosen.thread_words = (words + threads - 1) / threads;
  const int first_word = static_cast<int>(threadIdx.x) * chosen.thread_words;
  int mine = 0;
  for (int i = first_word; i < min(first_word + chosen.thread_words, words); ++i) mine += __popc(choice.bits[i]);
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) choice.before[warp] = sum;
  __syncthreads();
  int kept = 0;
  chosen.thread_before = sum - mine;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) chosen.thread_before += choice.before[w];
    kept += choice.before[w];
  }
  chosen.active = min(splits, (kept + pages_per_split - 1) / pages_per_split);
  const int each = (kept + chosen.active - 1) / chosen.active;
  chosen.active = (kept + each - 1) / each;
  chosen.first = min(split * each, kept);
  chosen.past = min((split + 1) * each, kept);
  if (split == 0) {
    if (task.kept != nullptr && threadIdx.x == 0) task.kept[blockIdx.y] = kept;
    if (task.keep_mask != nullptr) {
      uint32_t* const mask = task.keep_mask + int64_t{blockIdx.y} * ((task.page_capacity + 31) / 32);
      for (int i = static_cast<int>(threadIdx.x); i < words; i += threads) mask[i] = choice.bits[i];
    }
  }
  return chosen;
}

/// Puts the block's pages from rank `rank` on into the list, and says how many. The whole block together.
__device__ inline int list_pages(const ChosenPages& chosen, const Stretch& stretch, int rank, PageChoice& choice) {
  const int past = min(rank + listed_pages, chosen.past);
  const int words = (stretch.pages + 31) / 32;
  const int first_word = static_cast<int>(threadIdx.x) * chosen.thread_words;
  __syncthreads();  // the list before has been used
  int at = chosen.thread_before;
  for (int i = first_word; i < min(first_word + chosen.thread_words, words); ++i) {
    for (uint32_t bits = choice.bits[i]; bits != 0; bits &= bits - 1, ++at) {
      if (at >= rank && at < past) choice.list[at - rank] = stretch.begin + 32 * i + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  __syncthreads();
  return past - rank;
}

}  // namespace w4q::kernels::decode
