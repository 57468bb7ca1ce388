// Which pages of an fp4r cache a token attends to. The first page and the newest ones, scored by E2M1 codes alone, say
// for every query head how large scores get; a page is kept if some token of it comes within a margin of that for some
// head, by codes alone again. So what is kept depends on nothing but the cache and the queries: not on how blocks and
// warps share the work, and no block waits for another.
//
// Page i belongs to block i modulo the number of blocks, so that pages that are close together, and often kept
// together, are shared evenly.
#pragma once

#include "kernels/attention_cuda.h"
#include "kernels/attention_decode_parts.cuh"
#include "kernels/attention_loop.cuh"
#include "kernels/attention_operands.cuh"

namespace w4q::kernels::decode {

/// The pages that thresholds come from: the first one, which often draws most attention, and the newest. Every block
/// scores them all.
inline constexpr int threshold_pages = 16;
/// Pages that a block takes at least, before another one joins.
inline constexpr int pruned_pages_per_split = 4;
/// Pages that are listed at a time.
template <int dim>
inline constexpr int listed_pages = dim == 256 ? 256 : 1024;

/// A page of the sequence, or none (−1), and where it stands in the pool.
struct PagePlace {
  int index, place;

  __device__ bool exists() const { return index >= 0; }
};

/// Pages of a block.
struct OwnPages {
  const int32_t* table;
  int first, apart, count;

  __device__ OwnPages(const Task& task, const Stretch& stretch, int split, int active)
      : table(task.layer.table),
        first(stretch.begin + split),
        apart(active),
        count((stretch.pages - split + active - 1) / active) {}
  /// The number of the i-th one in the sequence.
  __device__ int operator()(int i) const { return first + i * apart; }
};

/// What the warps of a block share while they choose.
template <int dim>
struct PageChoice {
  static constexpr int words = fp4r_most_tokens / kv_page_tokens / 32;
  float largest[threshold_pages / 2][tile_heads];  ///< scores, as products leave them
  uint32_t kept[words];                            ///< a bit for each of the block's pages
  uint32_t shared[words];                          ///< … without those that a warp keeps for itself
  PagePlace list[listed_pages<dim>];

  __device__ void clear(int count) {
    for (int i = static_cast<int>(threadIdx.x); 32 * i < count; i += threads<dim>) kept[i] = shared[i] = 0;
  }
};

/// Scores pages by their codes, a warp two at a time in turn with the others: first those that thresholds come from,
/// then the block's own. All warps are at the first two when they wait for thresholds.
template <int dim>
class PageScoring {
 public:
  using Ring = Fp4Ring<dim>;
  using Queries = QueryFragments<KvType::fp4r, dim>;

  __device__ PageScoring(const Task& task, const BlockHeads& heads, const Stretch& stretch, const OwnPages& own,
                         Ring& ring)
      : margin_(task.margin / (score_factor(task) * Fp4Keys<dim, false>::score_unit)),
        heads_(heads.count),
        stretch_(stretch),
        head_(task, heads.kv_head),
        own_(own),
        ring_(ring) {
    look_up();
  }

  /// Asks for the warp's next pages. Twice before run(), for both places of the ring.
  __device__ void ask() { ask(asked_ % Ring::stages); }
  /// Says of all pages whether they are kept. The first of the warp's is its own: where it is, if there is one. The
  /// whole block together.
  __device__ PagePlace run(const Queries& queries, PageChoice<dim>& choice) {
    PagePlace own_first{-1, 0};
    float2 thresholds;
    bool first = true;
    take();
    while (first || more()) {
      float score[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) keys_[j].scores(queries, score[j]);
      take();
      const bool for_thresholds = pair_ < threshold_pairs;
      if (for_thresholds) send_largest(score, choice);
      if (first) {
        __syncthreads();
        thresholds = make_float2(threshold(choice, 0), threshold(choice, 1));
        first = false;
      }
      if (!for_thresholds && more()) choose(score, thresholds, choice, own_first);
      pair_ += warps<dim>;
    }
    device::wait_async<0>();
    __syncwarp();
    if (own_first.exists()) own_first.place = own_.table[own_first.index];
    return own_first;
  }

 private:
  static constexpr int threshold_pairs = threshold_pages / 2;
  static_assert(threshold_pairs <= warps<dim> && Ring::stages == 2);

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  /// The block's page of a pair, its first.
  __device__ static int own_page(int pair) { return 2 * (pair - threshold_pairs); }
  __device__ bool more() const { return pair_ < threshold_pairs || own_page(pair_) < own_.count; }
  /// The number-th page that thresholds come from. In a short context all pages do, and the first one several times.
  __device__ int threshold_page(int number) const {
    const int count = min(threshold_pages, stretch_.pages);
    return number == 0 || number >= count ? stretch_.begin : stretch_.begin + stretch_.pages - count + number;
  }
  /// Page j of a pair; past the newest one there may be none.
  __device__ int page_of(int pair, int j) const {
    return pair < threshold_pairs ? threshold_page(2 * pair + j) : own_(own_page(pair) + j);
  }
  __device__ bool exists(int page) const { return page < stretch_.begin + stretch_.pages; }

  /// Where the warp's next 32 pages stand: lane j has the j-th.
  __device__ void look_up() {
    const int page = page_of((asked_ + lane() / 2) * warps<dim> + warp(), lane() % 2);
    places_ = exists(page) ? own_.table[page] : -1;
  }
  /// The next two pages, half a warp for each. Closes a group even where there is none, so that groups can be counted.
  __device__ void ask(int stage) {
    constexpr int bytes = fp4_coarse_bytes<dim>;
    const int begin = lane() % 16 * 16;
    const int place = __shfl_sync(0xFFFFFFFFu, places_, 2 * asked_ + lane() / 16);
    if (place >= 0) {
      const std::byte* from = head_.keys(place) + begin;
      asm("" : "+l"(from));  // one address, from which the others are constant distances away
      char* const to = ring_.pages[stage] + lane() / 16 * bytes + begin;
#pragma unroll
      for (int at = 0; at < bytes; at += 256) {
        if (at + 256 <= bytes || at + begin < bytes) device::copy_async(to + at, from + at);
      }
    }
    device::close_async_group();
    if (++asked_ % 16 == 0) look_up();
  }
  /// The next pages from the ring.
  __device__ void take() {
    device::wait_async<Ring::stages - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) keys_[j].load(ring_.at(stage_) + j * fp4_coarse_bytes<dim>);
    __syncwarp();
    ask(stage_);
    stage_ ^= 1;
  }

  /// Of heads 2t and 2t + 1, of the lane's two tokens.
  __device__ static float2 larger(const float (&score)[4]) {
    return make_float2(fmaxf(score[0], score[2]), fmaxf(score[1], score[3]));
  }
  /// The largest score of every query head in two pages that thresholds come from.
  __device__ void send_largest(float (&score)[2][4], PageChoice<dim>& choice) const {
    float2 most = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = page_of(pair_, j) * kv_page_tokens;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!stretch_.sees(token + Fp4Keys<dim, false>::slot(i / 2))) score[j][i] = -INFINITY;
      }
      const float2 of_page = larger(score[j]);
      most = make_float2(fmaxf(most.x, of_page.x), fmaxf(most.y, of_page.y));
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      most.x = fmaxf(most.x, __shfl_xor_sync(0xFFFFFFFFu, most.x, step));
      most.y = fmaxf(most.y, __shfl_xor_sync(0xFFFFFFFFu, most.y, step));
    }
    if (lane() < 4) *reinterpret_cast<float2*>(&choice.largest[pair_][2 * lane()]) = most;
  }
  /// Of head 2t + j.
  __device__ float threshold(const PageChoice<dim>& choice, int j) const {
    const int head = 2 * (lane() % 4) + j;
    float largest = -INFINITY;
#pragma unroll
    for (const auto& of_pair : choice.largest) largest = fmaxf(largest, of_pair[head]);
    return head < heads_ ? largest - margin_ : INFINITY;
  }

  /// The first page of all, and the newest one, are kept whatever they score: these may have tokens that are not seen.
  __device__ bool is_usual(int page) const {
    return page > stretch_.begin && page < stretch_.begin + stretch_.pages - 1;
  }
  __device__ void choose(const float (&score)[2][4], const float2& thresholds, PageChoice<dim>& choice,
                         PagePlace& own_first) const {
    const int at = own_page(pair_);
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 most = larger(score[j]);
      if (__any_sync(0xFFFFFFFFu, most.x >= thresholds.x || most.y >= thresholds.y)) kept |= 1u << j;
    }
    if (!is_usual(own_(at)) || !is_usual(own_(at + 1))) {
      if (!is_usual(own_(at))) kept |= 1u;
      kept = exists(own_(at + 1)) ? kept | (is_usual(own_(at + 1)) ? 0u : 2u) : kept & 1u;
    }
    if (kept == 0) return;
    uint32_t shared = kept;
    if (!own_first.exists()) {
      own_first.index = own_(at + (kept & 1u ? 0 : 1));
      shared &= shared - 1;
    }
    if (lane() == 0) atomicOr(&choice.kept[at / 32], kept << at % 32);
    if (lane() == 1) atomicOr(&choice.shared[at / 32], shared << at % 32);
  }

  float margin_;
  int heads_;
  const Stretch& stretch_;
  HeadPages<KvType::fp4r, dim> head_;
  const OwnPages& own_;
  Ring& ring_;
  int pair_ = warp();
  int asked_ = 0, stage_ = 0, places_ = 0;
  Fp4Keys<dim, false> keys_[2];
};

/// Goes through a block's pages and lists those that are kept and that no warp has for itself. The whole block
/// together.
template <int dim>
class PageList {
 public:
  int kept = 0;  ///< up to now, all of them

  __device__ PageList(const Task& task, const Stretch& stretch, const OwnPages& own)
      : task_(task), stretch_(stretch), own_(own) {
    look_up();
  }

  __device__ bool ended() const { return at_ >= own_.count; }
  /// Fills the list, and says how many stand there.
  __device__ int fill(PageChoice<dim>& choice) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    int listed = 0;
    __syncthreads();  // all pages have been scored, and the list before has been read
    while (!ended() && listed + threads<dim> <= listed_pages<dim>) {
      const int i = at_ + static_cast<int>(threadIdx.x);
      const int word = at_ / 32 + lane;
      const bool has_word = lane < warps<dim> && 32 * word < own_.count;
      const int of_lane = has_word ? __popc(choice.shared[word]) : 0;
      const uint32_t votes = 32 * (at_ / 32 + warp) < own_.count ? choice.shared[at_ / 32 + warp] : 0;
      const int before = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? of_lane : 0);
      if ((votes >> lane & 1u) != 0) {
        choice.list[listed + before + __popc(votes & ((1u << lane) - 1))] = {own_(i), place_};
      }
      listed += __reduce_add_sync(0xFFFFFFFFu, of_lane);
      kept += __reduce_add_sync(0xFFFFFFFFu, has_word ? __popc(choice.kept[word]) : 0);
      if (i < own_.count && task_.keep_mask != nullptr) {
        record(own_(i) - stretch_.begin, (choice.kept[i / 32] >> i % 32 & 1u) != 0);
      }
      at_ += threads<dim>;
      look_up();
    }
    __syncthreads();
    return listed;
  }

 private:
  /// Where the thread's next page stands, before it is known whether it is kept.
  __device__ void look_up() {
    const int page = own_(at_ + static_cast<int>(threadIdx.x));
    place_ = page < stretch_.begin + stretch_.pages ? own_.table[page] : 0;
  }
  __device__ void record(int page, bool keep) const {
    uint32_t* const word = task_.keep_mask + int64_t{blockIdx.y} * task_.mask_words + page / 32;
    if (keep) {
      atomicOr(word, 1u << page % 32);
    } else {
      atomicAnd(word, ~(1u << page % 32));
    }
  }

  const Task& task_;
  const Stretch& stretch_;
  const OwnPages& own_;
  int at_ = 0, place_ = 0;
};

/// Brings the numbers of kept pages to the last block of a key head; a warp by itself.
__device__ inline void count_kept(const Task& task, int split, int active, int kept) {
  if (task.kept == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  kbit::Packet* const packets = task.kept_packets + static_cast<int64_t>(blockIdx.y * gridDim.x);
  if (split + 1 < active) {
    if (lane == 0) kbit::send(packets + split, static_cast<float>(kept));
    return;
  }
  float others[1] = {};
  for (int other = lane; other < active - 1; other += 32) kbit::receive(packets + other, 1, others);
  const float sum = warp_sum(others[0]);
  if (lane == 0) task.kept[blockIdx.y] = kept + static_cast<int>(sum);
}

}  // namespace w4q::kernels::decode
