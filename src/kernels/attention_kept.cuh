// A warp's way through the pages that are kept: its own first one, then its share of the block's list. One is in
// registers, the next on its way into shared memory.
#pragma once

#include "kernels/attention_pages.cuh"

namespace w4q::kernels::decode {

template <int dim>
class KeptAttending {
 public:
  static constexpr KvType type = KvType::fp4r;

  __device__ KeptAttending(const Task& task, const Stretch& stretch, const BlockHeads& heads,
                           const CodeScores<dim>& scores, NextPage<type, dim>& next)
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
      if (page.scores == KeptPage::no_scores) next_.ask_key_codes(keys);
      next_.ask_parameters(keys, values);
      next_.ask_rest(keys);
      next_.ask_value_codes(values);
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
      fine_.template load<true>(next_.keys());
      values_.template load<true>(next_.values());
      coarse_scores<true>(next_.keys(), queries, score);
      __syncwarp();
    } else {
      fine_.load(head_.keys(asked_.place));
      values_.load(head_.values(asked_.place));
      coarse_scores<false>(head_.keys(asked_.place), queries, score);
    }
  }
  template <bool spread>
  __device__ void coarse_scores(const std::byte* keys, const QueryFragments<type, dim>& queries, float (&score)[4]) {
    if (asked_.scores != KeptPage::no_scores) {
      scores_.get(asked_.scores, heads_, score);
      return;
    }
    CoarseKeys<dim> coarse;
    coarse.template load<spread>(keys);
    score[0] = score[1] = score[2] = score[3] = 0;
    coarse.add_scores(queries, score);
  }

  Sight sight_;
  HeadPages<type, dim> head_;
  const CodeScores<dim>& scores_;
  int heads_;
  NextPage<type, dim>& next_;
  KeptPage asked_;
  FineKeys<dim> fine_;
  PageValues<type, dim> values_;
  float factor_;
};

}  // namespace w4q::kernels::decode
