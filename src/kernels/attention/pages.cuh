// Which pages of an fp4r cache a token attends to. The first page and the newest ones, scored by E2M1 codes alone, say
// for every query head how large scores get; a page is kept if some token of it comes within a margin of that for some
// head, by codes alone again. So what is kept depends on nothing but the cache and the queries: not on how blocks and
// warps share the work, and no block waits for another.
//
// Page i belongs to block i modulo the number of blocks, so that pages that are close together, and often kept
// together, are shared evenly.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/decode_parts.cuh"
#include "kernels/attention/loop.cuh"
#include "kernels/attention/operands.cuh"

namespace w4q::kernels::decode {

/// The pages that thresholds come from: the first one, which often draws most attention, and the newest. Every block
/// scores them all.
inline constexpr int threshold_pages = 16;
/// Pages that a block takes at least, before another one joins.
inline constexpr int pruned_pages_per_split = 4;

/// A page of the sequence that is kept, or none.
struct KeptPage {
  static constexpr int no_scores = -1;
  uint16_t index;
  int16_t scores_at;  ///< where its coarse scores are (CoarseScores), or no_scores
  int place;          ///< in the pool; below 0: none

  __device__ static KeptPage none() { return {0, no_scores, -1}; }
  __device__ bool exists() const { return place >= 0; }
};
static_assert(fp4r_most_tokens / kv_page_tokens <= 1 << 16);

/// Scores by codes alone of the first pages that each warp keeps, which need not be computed again when what the codes
/// leave is added. Up to four heads take half the room of eight.
template <int dim>
struct CoarseScores {
  static constexpr int warp_places = dim == 256 ? 2 : 5;
  static constexpr int places = warps<dim> * warp_places;
  float4 lanes[places * 16];

  __device__ static int places_of_page(int heads) { return heads <= 4 ? 1 : 2; }
  __device__ void put(int place, int heads, const float (&score)[4]) {
    if (has(heads)) lanes[16 * place + lane_of(heads)] = make_float4(score[0], score[1], score[2], score[3]);
  }
  __device__ void get(int place, int heads, float (&score)[4]) const {
    const float4 four = has(heads) ? lanes[16 * place + lane_of(heads)] : make_float4(0, 0, 0, 0);
    score[0] = four.x, score[1] = four.y, score[2] = four.z, score[3] = four.w;
  }

 private:
  /// Whether the lane has heads, 2t and 2t + 1.
  __device__ static bool has(int heads) { return heads > 4 || threadIdx.x % 4 < 2; }
  __device__ static int lane_of(int heads) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return heads > 4 ? lane : lane / 4 * 2 + lane % 4;
  }
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
  uint32_t kept[words];            ///< a bit for each of the block's pages, but for those that a warp has for itself
  int8_t scores_at[threads<dim>];  ///< of the block's first pages: where the scores of those that are kept are
  KeptPage list[threads<dim>];
  CoarseScores<dim> coarse;
  static_assert(CoarseScores<dim>::places <= 128, "scores_at");

  /// Before anything is scored `count` pages are kept, all of them or none.
  __device__ void begin(int count, bool all) {
    for (int i = static_cast<int>(threadIdx.x); 32 * i < count; i += threads<dim>) {
      const int left = count - 32 * i;
      kept[i] = !all ? 0 : left < 32 ? (1u << left) - 1 : ~0u;
    }
    scores_at[threadIdx.x] = KeptPage::no_scores;
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
      : margin_(task.margin / (score_factor(task) * CoarseKeys<dim>::unit)),
        heads_(heads.count),
        stretch_(stretch),
        head_(task, heads.kv_head),
        own_(own),
        ring_(ring) {
    places_ = place_of(page_of(warp() + lane() / 2 * warps<dim>, lane() % 2));
  }

  /// Asks for the warp's next pages. Twice before run(), for both places of the ring.
  __device__ void ask() { ask(asked_ % Ring::stages); }
  /// Says of all pages whether they are kept. The first of the warp's is its own, if there is one. The whole block
  /// together.
  __device__ KeptPage run(const Queries& queries, PageChoice<dim>& choice) {
    KeptPage own_first = KeptPage::none();
    float score[2][4];
    take();
    multiply(queries, score);
    if (pair_ < threshold_pairs) send_largest(score, choice);
    __syncthreads();
    const float2 thresholds = make_float2(threshold(choice, 0), threshold(choice, 1));
    if (pair_ >= threshold_pairs && own_page() < own_.count) choose(score, thresholds, choice, own_first);
    for (pair_ += warps<dim>; own_page() < own_.count; pair_ += warps<dim>) {
      multiply(queries, score);
      choose(score, thresholds, choice, own_first);
    }
    device::wait_async<0>();
    __syncwarp();
    if (own_first.exists()) own_first.place = own_.table[own_first.index];
    return own_first;
  }

 private:
  static constexpr int threshold_pairs = threshold_pages / 2;
  using Page = Fp4Page<dim>;
  static_assert(threshold_pairs <= warps<dim> && Ring::stages == 2);

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  /// The block's page of the pair at hand, its first.
  __device__ int own_page() const { return 2 * (pair_ - threshold_pairs); }
  /// The number-th page that thresholds come from. In a short context all pages do, and the first one several times.
  __device__ int threshold_page(int number) const {
    const int count = min(threshold_pages, stretch_.pages);
    return number == 0 || number >= count ? stretch_.begin : stretch_.begin + stretch_.pages - count + number;
  }
  /// Page j of a pair; past the newest one there may be none.
  __device__ int page_of(int pair, int j) const {
    return pair < threshold_pairs ? threshold_page(2 * pair + j) : own_(2 * (pair - threshold_pairs) + j);
  }
  __device__ bool exists(int page) const { return page < stretch_.begin + stretch_.pages; }
  /// In the pool; -1: there is no such page.
  __device__ int place_of(int page) const { return exists(page) ? own_.table[page] : -1; }

  /// Where the warp's next 32 pages stand, all of them its own: lane j has the j-th.
  __device__ void look_up() {
    places_ = place_of(own_(2 * ((asked_ + lane() / 2) * warps<dim> + warp() - threshold_pairs) + lane() % 2));
  }
  /// The next two pages, half a warp for each. Closes a group even where there is none, so that groups can be counted.
  __device__ void ask(int stage) {
    const int begin = lane() % 16 * 16;
    const int place = __shfl_sync(0xFFFFFFFFu, places_, 2 * asked_ + lane() / 16);
    if (place >= 0) {
      const std::byte* from = head_.keys(place) + begin;
      asm("" : "+l"(from));  // one address, from which the others are constant distances away
      char* const to = ring_.pages[stage] + lane() / 16 * Page::coarse;
#pragma unroll
      for (int at = 0; at < Page::codes; at += 256) {
        device::copy_async(to + Fp4Codes<dim>::Spread::place(at + begin), from + at);
      }
      copy_scales(to + Page::codes, from - begin + Page::codes);
    }
    device::close_async_group();
    if (++asked_ % 16 == 0) look_up();
  }
  /// Half a warp copies a page's.
  __device__ static void copy_scales(char* to, const std::byte* from) {
    constexpr int bytes = Page::scales / 16;
    const int at = lane() % 16 * bytes;
    if constexpr (bytes == 16) {
      device::copy_async(to + at, from + at);
    } else {
      device::copy_few_async<bytes>(to + at, from + at);
    }
  }
  /// The next pages from the ring.
  __device__ void take() {
    device::wait_async<Ring::stages - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) keys_[j].template load<true>(ring_.at(stage_) + j * Page::coarse);
    __syncwarp();
    ask(stage_);
    stage_ ^= 1;
  }
  /// Scores of the two pages at hand, and on to the next.
  __device__ __forceinline__ void multiply(const Queries& queries, float (&score)[2][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) keys_[j].scores(queries, score[j]);
    take();
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
      mask_scores([&](int slot) { return stretch_.sees(token + slot); }, score[j]);
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

  /// Whether some token of a page reaches the threshold of some head.
  __device__ static bool reaches(const float (&score)[4], const float2& thresholds) {
    const float2 most = larger(score);
    return __any_sync(0xFFFFFFFFu, most.x >= thresholds.x || most.y >= thresholds.y);
  }
  /// The first page of all, and the newest one, are kept whatever they score: these may have tokens that are not seen.
  __device__ bool is_usual(int page) const {
    return page > stretch_.begin && page < stretch_.begin + stretch_.pages - 1;
  }
  __device__ void choose(const float (&score)[2][4], const float2& thresholds, PageChoice<dim>& choice,
                         KeptPage& own_first) {
    const int at = own_page();
    bool kept[2] = {reaches(score[0], thresholds), reaches(score[1], thresholds)};
    if (at == 0 || at + 2 >= own_.count) {
      kept[0] |= !is_usual(own_(at));
      kept[1] = exists(own_(at + 1)) && (kept[1] || !is_usual(own_(at + 1)));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (kept[j]) keep(at + j, score[j], choice, own_first);
    }
  }
  /// The block's page i.
  __device__ void keep(int i, const float (&score)[4], PageChoice<dim>& choice, KeptPage& own_first) {
    const int scores_at = keep_scores(score, choice.coarse);
    if (!own_first.exists()) {
      own_first = {static_cast<uint16_t>(own_(i)), static_cast<int16_t>(scores_at), 0};
      return;
    }
    if (lane() == 0) atomicOr(&choice.kept[i / 32], 1u << i % 32);
    if (lane() == 1 && i < threads<dim>) choice.scores_at[i] = static_cast<int8_t>(scores_at);
  }
  /// Where there is room left.
  __device__ int keep_scores(const float (&score)[4], CoarseScores<dim>& coarse) {
    const int count = CoarseScores<dim>::places_of_page(heads_);
    if (places_taken_ + count > CoarseScores<dim>::warp_places) return KeptPage::no_scores;
    const int place = warp() * CoarseScores<dim>::warp_places + places_taken_;
    places_taken_ += count;
    coarse.put(place, heads_, score);
    return place;
  }

  float margin_;
  int heads_;
  const Stretch& stretch_;
  HeadPages<KvType::fp4r, dim> head_;
  const OwnPages& own_;
  Ring& ring_;
  int pair_ = warp();
  int asked_ = 0, stage_ = 0, places_ = 0, places_taken_ = 0;
  CoarseKeys<dim> keys_[2];
};

/// Goes through a block's pages and lists those that are kept and that no warp has for itself. The whole block
/// together.
template <int dim>
class PageList {
 public:
  int kept = 0;  ///< of the pages up to now, and all that warps have for themselves

  __device__ PageList(const Task& task, const Stretch& stretch, const OwnPages& own)
      : task_(task), stretch_(stretch), own_(own) {
    look_up();
  }

  __device__ bool ended() const { return at_ >= own_.count; }
  /// Lists those of the next pages, one for each thread, and says how many they are. With a warp's own page, the first
  /// time.
  __device__ int fill(PageChoice<dim>& choice, const KeptPage& own_first) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    // All pages have been scored, and the list before has been read.
    const int own_pages = __syncthreads_count(static_cast<int>(at_ == 0 && lane == 0 && own_first.exists()));
    const int i = at_ + static_cast<int>(threadIdx.x);
    const int word = at_ / 32 + lane;
    const int of_lane = lane < warps<dim> && 32 * word < own_.count ? __popc(choice.kept[word]) : 0;
    const uint32_t votes = 32 * (at_ / 32 + warp) < own_.count ? choice.kept[at_ / 32 + warp] : 0;
    const bool listed = (votes >> lane & 1u) != 0;
    const int before = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? of_lane : 0);
    const int count = __reduce_add_sync(0xFFFFFFFFu, of_lane);
    if (listed) {
      const int scores_at = at_ == 0 ? choice.scores_at[i] : KeptPage::no_scores;
      choice.list[before + __popc(votes & ((1u << lane) - 1))] = {static_cast<uint16_t>(own_(i)),
                                                                  static_cast<int16_t>(scores_at), place_};
    }
    kept += count + own_pages;
    if (task_.keep_mask != nullptr && i < own_.count) record(own_(i), listed);
    __syncthreads();
    const bool own_here =
        own_first.exists() && own_first.index >= own_(at_) && own_first.index < own_(at_ + threads<dim>);
    if (task_.keep_mask != nullptr && lane == 0 && own_here) record(own_first.index, true);
    at_ += threads<dim>;
    look_up();
    return count;
  }

 private:
  /// Where the thread's next page stands, before it is known whether it is kept.
  __device__ void look_up() {
    const int page = own_(at_ + static_cast<int>(threadIdx.x));
    place_ = page < stretch_.begin + stretch_.pages ? own_.table[page] : 0;
  }
  __device__ void record(int page, bool keep) const {
    const int bit = page - stretch_.begin;
    uint32_t* const word = task_.keep_mask + int64_t{blockIdx.x} * task_.mask_words + bit / 32;
    if (keep) {
      atomicOr(word, 1u << bit % 32);
    } else {
      atomicAnd(word, ~(1u << bit % 32));
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
  frame::MailboxWord* const mailboxes = task.kept_mailboxes + static_cast<int64_t>(blockIdx.x * gridDim.y);
  if (split + 1 < active) {
    if (lane == 0) frame::send(mailboxes + split, static_cast<float>(kept));
    return;
  }
  float others[1] = {};
  for (int other = lane; other < active - 1; other += 32) frame::receive(mailboxes + other, 1, others);
  const float sum = warp_sum(others[0]);
  if (lane == 0) task.kept[blockIdx.x] = kept + static_cast<int>(sum);
}

}  // namespace w4q::kernels::decode
