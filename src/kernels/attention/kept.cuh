// A warp's way through the pages that are kept: its own first one, then its share of the block's list. One is in
// registers, the next on its way into shared memory, its rows in an order that keeps lanes out of each other's banks.
#pragma once

#include "kernels/attention/pages.cuh"

namespace w4q::kernels::decode {

/// Starts copying rows into shared memory in another order (SpreadKeys, SpreadValues): a multiple of 512 bytes, of
/// which a lane takes 16 in turn, those at `lane_from` first. The whole warp together.
template <class Order, int bytes>
__device__ __forceinline__ void copy_rows(char* to, const std::byte* lane_from) {
  static_assert(bytes % 512 == 0);
#pragma unroll
  for (int at = 0; at < bytes; at += 512) {
    device::copy_async(to + Order::place(at + 16 * static_cast<int>(threadIdx.x % 32)), lane_from + at);
  }
}

/// Starts copying a page of keys and the page of values behind it, by parts, each from where the lane's first 16 bytes
/// stand.
template <int dim>
struct KeptPageCopy {
  using Keys = Fp4Page<dim>;
  static constexpr KvType value_type = kv_value_type(KvType::fp4r);
  static constexpr int value_codes = kv_page_tokens * kv_row_bytes(value_type, dim);
  static constexpr int value_scales = kv_page_tokens * kv_parameter_bytes(value_type, dim);
  char* page;

  __device__ void key_codes(const std::byte* lane_keys) const {
    copy_rows<typename Fp4Codes<dim>::Spread, Keys::codes>(page, lane_keys);
  }
  __device__ void rest(const std::byte* lane_keys) const {
    copy_rows<typename Fp4Rest<dim>::Spread, Keys::all - Keys::coarse>(page + Keys::coarse, lane_keys + Keys::coarse);
  }
  __device__ void values(const std::byte* lane_values) const {
    copy_rows<SpreadValues<kv_row_bytes(value_type, dim)>, value_codes>(page + Keys::all, lane_values);
  }
  /// Half a warp copies those of keys, the other half those of values.
  __device__ void scales(const std::byte* lane_keys, const std::byte* lane_values) const {
    static_assert(Keys::scales <= 256 && value_scales <= 256);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool of_keys = lane < 16;
    if (lane % 16 * 16 >= (of_keys ? Keys::scales : value_scales)) return;
    const int at = of_keys ? Keys::codes : value_codes - 256;
    device::copy_async(page + (of_keys ? 0 : Keys::all) + at + 16 * lane, (of_keys ? lane_keys : lane_values) + at);
  }
};

template <int dim>
class KeptAttending {
 public:
  static constexpr KvType type = KvType::fp4r;

  __device__ KeptAttending(const Task& task, const Stretch& stretch, const BlockHeads& heads,
                           const CoarseScores<dim>& scores, NextPage<type, dim>& next)
      : sight_(stretch),
        head_(task, heads.kv_head),
        scores_(scores),
        heads_(heads.count),
        next_(next),
        factor_(score_factor(task) * PageKeys<type, dim>::score_unit) {}

  /// Asks for a page, if it exists; nothing else is on its way. Codes of keys are not needed where scores are there.
  __device__ void ask(const KeptPage& page) {
    asked_ = page;
    if constexpr (has_next_page<type, dim>) {
      if (!page.exists()) return;
      const int lane_begin = 16 * static_cast<int>(threadIdx.x % 32);
      const std::byte *keys = head_.keys(page.place) + lane_begin, *values = head_.values(page.place) + lane_begin;
      asm("" : "+l"(keys), "+l"(values));  // two addresses, from which the others are constant distances away
      const KeptPageCopy<dim> copy{next_.page};
      if (page.scores_at == KeptPage::no_scores) copy.key_codes(keys);
      copy.scales(keys, values);
      copy.rest(keys);
      copy.values(values);
      device::close_async_group();
    }
  }
  /// Attends to the page that has been asked for and to the warp's pages of a list.
  __device__ void run(const KeptPage* list, int count, const QueryFragments<type, dim>& queries,
                      Running<type, dim>& running) {
    int i = static_cast<int>(threadIdx.x / 32);
    const auto ask_next = [&] {
      ask(i < count ? list[i] : KeptPage::none());
      i += warps<dim>;
    };
    if (!asked_.exists()) ask_next();
    while (asked_.exists()) {
      const int index = asked_.index;
      float score[4];
      take(queries, score);
      ask_next();
      add_fine_scores(fine_, queries, score);
      if (!sight_.sees_all(index)) {
        mask_page([&](int slot) { return sight_.stretch.sees(index * kv_page_tokens + slot); }, score, values_);
      }
      running.weigh(score, factor_, values_);
      running.add(values_, score);
    }
  }

 private:
  /// The page from where it stands, and its scores by codes alone.
  __device__ __forceinline__ void take(const QueryFragments<type, dim>& queries, float (&score)[4]) {
    if constexpr (has_next_page<type, dim>) {
      device::wait_async<0>();
      __syncwarp();
      const auto* const page = reinterpret_cast<const std::byte*>(next_.page);
      fine_.template load<true>(page);
      values_.template load<true>(page + Fp4Page<dim>::all);
      coarse_scores<true>(page, queries, score);
      __syncwarp();
    } else {
      fine_.load(head_.keys(asked_.place));
      values_.load(head_.values(asked_.place));
      coarse_scores<false>(head_.keys(asked_.place), queries, score);
    }
  }
  template <bool spread>
  __device__ void coarse_scores(const std::byte* keys, const QueryFragments<type, dim>& queries, float (&score)[4]) {
    if (asked_.scores_at != KeptPage::no_scores) {
      scores_.get(asked_.scores_at, heads_, score);
      return;
    }
    CoarseKeys<dim> coarse;
    coarse.template load<spread>(keys);
    coarse.scores(queries, score);
  }

  Sight sight_;
  HeadPages<type, dim> head_;
  const CoarseScores<dim>& scores_;
  int heads_;
  NextPage<type, dim>& next_;
  KeptPage asked_;
  FineKeys<dim> fine_;
  PageValues<type, dim> values_;
  float factor_;
};

}  // namespace w4q::kernels::decode
