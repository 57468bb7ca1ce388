// Which pages of an fp4r cache a token attends to. Blocks that share a key head score their pages by E2M1 codes alone,
// tell each other the largest score of every query head, and keep those pages of their own of which some head's largest
// score is at most a margin below that. What is kept depends on nothing but the cache and the queries: it is the same
// from run to run. Page i belongs to block i modulo the number of blocks, so that pages that are close together, and
// often kept together, are shared evenly.
//
// Blocks wait for each other, so all of a key head must run at the same time: the launch sees to it.
#pragma once

#include "kernels/attention_decode_parts.cuh"
#include "kernels/attention_loop.cuh"
#include "kernels/attention_operands.cuh"

namespace w4q::kernels::decode {

/// Pages that are listed at a time, and those of a block whose scores have room in shared memory.
template <int dim>
inline constexpr int listed_pages = dim == 256 ? 512 : 1024;
template <int dim>
inline constexpr int scored_pages = dim == 256 ? 256 : 512;

/// A page of the sequence that is kept, and where it stands in the pool.
struct ListedPage {
  int index, place;
};

/// The warp's pages of a list.
template <int dim>
class ListedPages {
 public:
  __device__ ListedPages(const ListedPage* list, int count)
      : count(count), list_(list), at_(static_cast<int>(threadIdx.x / 32)) {}
  __device__ int operator()(int i) const { return list_[i].index; }
  __device__ int next() {
    const int i = at_;
    at_ += warps<dim>;
    return i < count ? list_[i].place : 0;
  }
  const int count;

 private:
  const ListedPage* list_;
  int at_;
};

/// The largest scores of a page, a half for each query head.
using PageScores = uint4;

/// What the warps of a block share while they choose.
template <int dim>
struct PageChoice {
  float largest[warps<dim>][tile_heads];
  float threshold[tile_heads];
  int counts[warps<dim>];
  ListedPage list[listed_pages<dim>];
  PageScores scores[scored_pages<dim>];
};

__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
  const __half2 most = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(most);
}

/// Scores pages of keys by their codes. A warp takes the warp-th, (warp + warps)-th …, two at a time.
template <int dim>
class PageScoring {
 public:
  __device__ PageScoring(const Task& task, const Stretch& stretch, int kv_head, const PoolPages<dim>& pages,
                         Fp4Ring<dim>& ring)
      : sight_(stretch), head_(task, kv_head), pages_(pages), ring_(ring) {}

  /// Asks for the first pages; the last place of the ring may still be in use.
  __device__ void begin() { ask(warp(), 0); }

  /// Leaves the largest score of every page and query head, in units of log2, and in `largest` that of all of the
  /// warp's pages.
  __device__ void run(const QueryFragments<KvType::fp4r, dim>& queries, float factor, PageScores* to,
                      float (&largest)[tile_heads]) {
    ask(warp() + 2 * warps<dim>, 1);
    uint32_t most_of_all = below_all;
    int stage = 0;
    for (int i = warp(); i < pages_.count; i += 2 * warps<dim>, stage ^= 1) {
      device::wait_async<1>();
      __syncwarp();
      Fp4Keys<dim, false> keys[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) keys[j].load(ring_.at(stage) + j * fp4_coarse_bytes<dim>);
      __syncwarp();
      ask(i + 4 * warps<dim>, stage);
      float score[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) keys[j].scores(queries, score[j]);
      const uint32_t most =
          largest_of_two(largest_of_tokens(i, score[0], factor), largest_of_tokens(i + warps<dim>, score[1], factor));
      most_of_all = larger_halves(most_of_all, most);
      const int lane = static_cast<int>(threadIdx.x % 32);
      const int at = i + lane / 4 * warps<dim>;
      if (lane < 8 && at < pages_.count) reinterpret_cast<uint32_t*>(to + at)[lane % 4] = most;
    }
    most_of_all = larger_halves(most_of_all, __shfl_xor_sync(0xFFFFFFFFu, most_of_all, 4));
    if (threadIdx.x % 32 >= 4) return;
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(most_of_all));
    *reinterpret_cast<float2*>(&largest[2 * (threadIdx.x % 4)]) = pair;
  }

 private:
  static constexpr uint32_t below_all = 0xFC00FC00u;  // −∞

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  /// Pages i and i + warps; the first one twice where there is no other. Closes a group even where there is none, so
  /// that groups can be counted.
  __device__ void ask(int i, int stage) {
    const int first = pages_.next();
    const int second = pages_.next();
    if (i < pages_.count) {
      constexpr int bytes = fp4_coarse_bytes<dim>;
      copy_from_page<bytes, bytes>(ring_.pages[stage], head_.keys(first),
                                   head_.keys(i + warps<dim> < pages_.count ? second : first));
    }
    device::close_async_group();
  }
  /// Of the lane's tokens that are seen, for heads 2t and 2t + 1.
  __device__ uint32_t largest_of_tokens(int i, float (&score)[4], float factor) const {
    const int index = pages_(i);
    if (!sight_.sees_all(index)) {
      mask_scores([&](int slot) { return sight_.stretch.sees(index * kv_page_tokens + slot); }, score);
    }
    return device::HalfType::pack(fmaxf(score[0], score[2]) * factor, fmaxf(score[1], score[3]) * factor);
  }
  /// Of all tokens of two pages: of the first one in lanes of even g, of the second one in the others.
  __device__ static uint32_t largest_of_two(uint32_t first, uint32_t second) {
    const bool odd = (threadIdx.x & 4) != 0;
    uint32_t most = larger_halves(odd ? second : first, __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 4));
#pragma unroll
    for (int step = 8; step < 32; step *= 2) most = larger_halves(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    return most;
  }

  Sight sight_;
  HeadPages<KvType::fp4r, dim> head_;
  PoolPages<dim> pages_;
  Fp4Ring<dim>& ring_;
};

/// A number that this launch has not yet sent, from other launches' numbers.
__device__ __forceinline__ void send_marked(kbit::Packet* to, uint32_t mark, uint32_t bits) {
  const kbit::Packet word = static_cast<kbit::Packet>(mark) << 32 | bits;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint32_t receive_marked(const kbit::Packet* from, uint32_t mark) {
  kbit::Packet word = kbit::peek(from);
  while (word >> 32 != mark) word = kbit::peek(from);
  return static_cast<uint32_t>(word);
}

/// The mark of this launch's packets: one more than the last one's.
__device__ __forceinline__ uint32_t read_mark(const Task& task) {
  uint32_t launches;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(launches)
               : "l"(task.exchange.launches + blockIdx.y)
               : "memory");
  return launches + 1;
}

/// From the largest scores of the block's warps the thresholds of all heads. The whole block together.
template <int dim>
__device__ void agree_on_thresholds(const Task& task, const BlockHeads& heads, int active, uint32_t mark,
                                    PageChoice<dim>& choice) {
  static_assert(warps<dim> >= tile_heads && most_splits <= 64);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  kbit::Packet* const packets = task.exchange.largest + static_cast<int64_t>(blockIdx.y * gridDim.x) * tile_heads;
  __syncthreads();
  if (threadIdx.x < tile_heads) {
    float largest = -INFINITY;
#pragma unroll
    for (const auto& of_warp : choice.largest) largest = fmaxf(largest, of_warp[threadIdx.x]);
    send_marked(packets + blockIdx.x * tile_heads + threadIdx.x, mark, __float_as_uint(largest));
  }
  if (warp < tile_heads) {
    float largest = lowest;
    if (warp < heads.count) {
#pragma unroll
      for (int split = lane; split < most_splits; split += 32) {
        if (split >= active) break;
        largest = fmaxf(largest, __uint_as_float(receive_marked(packets + split * tile_heads + warp, mark)));
      }
      largest = warp_max(largest);
    }
    // Scores of pages are rounded to f16; a margin may be infinite.
    const float threshold = largest - task.margin - fabsf(largest) * 0x1p-10f;
    if (lane == 0) choice.threshold[warp] = warp < heads.count ? threshold : INFINITY;
  }
  __syncthreads();
}

/// Goes through a block's pages and lists those that are kept. The whole block together; page 0 and the newest one are
/// always kept.
template <int dim>
class PageList {
 public:
  int kept = 0;  ///< up to now

  __device__ PageList(const Task& task, const Stretch& stretch, const PoolPages<dim>& own, const PageScores* scores)
      : task_(task), stretch_(stretch), own_(own), scores_(scores) {
    look_up();
  }

  __device__ bool ended() const { return at_ >= own_.count; }
  /// Fills the list, and says how many stand there.
  __device__ int fill(PageChoice<dim>& choice) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    int listed = 0;
    while (!ended() && listed + threads<dim> <= listed_pages<dim>) {
      const int i = at_ + static_cast<int>(threadIdx.x);
      const bool keep = i < own_.count && keeps(i, choice);
      const uint32_t votes = __ballot_sync(0xFFFFFFFFu, keep);
      __syncthreads();  // counts, and the list before, have been read
      if (lane == 0) choice.counts[warp] = __popc(votes);
      __syncthreads();
      int before = listed + __popc(votes & ((1u << lane) - 1));
#pragma unroll
      for (int w = 0; w < warps<dim>; ++w) {
        const int count = choice.counts[w];
        if (w < warp) before += count;
        listed += count;
      }
      if (keep) choice.list[before] = {own_(i), place_};
      if (i < own_.count && task_.keep_mask != nullptr) record(own_(i) - stretch_.begin, keep);
      at_ += threads<dim>;
      look_up();
    }
    kept += listed;
    __syncthreads();
    return listed;
  }

 private:
  /// Where the thread's next page stands, before it is known whether it is kept.
  __device__ void look_up() {
    const int i = at_ + static_cast<int>(threadIdx.x);
    place_ = i < own_.count ? task_.layer.table[own_(i)] : 0;
  }
  __device__ bool keeps(int i, const PageChoice<dim>& choice) const {
    const int page = own_(i) - stretch_.begin;
    bool keep = page == 0 || page == stretch_.pages - 1;
    const PageScores scores = scores_[i];
    const uint32_t pairs[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
    for (int h = 0; h < tile_heads; ++h) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[h / 2]));
      keep |= (h % 2 == 0 ? pair.x : pair.y) >= choice.threshold[h];
    }
    return keep;
  }
  __device__ void record(int page, bool keep) const {
    uint32_t* const word =
        task_.keep_mask + int64_t{blockIdx.y} * ((task_.exchange.page_capacity + 31) / 32) + page / 32;
    if (keep) {
      atomicOr(word, 1u << page % 32);
    } else {
      atomicAnd(word, ~(1u << page % 32));
    }
  }

  const Task& task_;
  const Stretch& stretch_;
  const PoolPages<dim>& own_;
  const PageScores* scores_;
  int at_ = 0, place_ = 0;
};

/// Brings the numbers of kept pages to the last block, which has waited for all others when it ends the launch.
__device__ inline void count_kept(const Task& task, int split, int active, uint32_t mark, int kept) {
  kbit::Packet* const packets = task.exchange.kept + static_cast<int64_t>(blockIdx.y * gridDim.x);
  const bool last = split + 1 == active;
  if (task.kept != nullptr && !last && threadIdx.x == 0)
    send_marked(packets + split, mark, static_cast<uint32_t>(kept));
  if (task.kept != nullptr && last && threadIdx.x < 32) {
    int sum = threadIdx.x == 0 ? kept : 0;
    for (int other = static_cast<int>(threadIdx.x); other < active - 1; other += 32) {
      sum += static_cast<int>(receive_marked(packets + other, mark));
    }
    sum = warp_reduce(sum, [](int a, int b) { return a + b; });
    if (threadIdx.x == 0) task.kept[blockIdx.y] = sum;
  }
  if (last && threadIdx.x == 0) task.exchange.launches[blockIdx.y] = mark;
}

}  // namespace w4q::kernels::decode
