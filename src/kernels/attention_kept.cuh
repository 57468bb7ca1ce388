// A warp's way through the pages that are kept: its own first one, then its share of the block's list. One is in
// registers, the next on its way into shared memory.
#pragma once

#include "kernels/attention_pages.cuh"

namespace w4q::kernels::decode {

template <int dim>
class KeptAttending {
 public:
  static constexpr KvType type = KvType::fp4r;

  __device__ KeptAttending(const Task& task, const Stretch& stretch, int kv_head, NextPage<type, dim>& next)
      : sight_(stretch),
        head_(task, kv_head),
        next_(next),
        factor_(score_factor(task) * PageKeys<type, dim>::score_unit) {}

  /// Asks for a page, if it exists; nothing else is on its way.
  __device__ void ask(const PagePlace& page) {
    asked_ = page;
    if (!copies || !page.exists()) return;
    copy_from_page<key_bytes, kv_value_page_bytes(type, dim)>(next_.page, head_.keys(page.place),
                                                              head_.values(page.place));
    device::close_async_group();
  }
  /// Attends to the page that has been asked for and to the warp's pages of a list.
  __device__ void run(const PagePlace* list, int count, const QueryFragments<type, dim>& queries,
                      Running<type, dim>& running) {
    int i = static_cast<int>(threadIdx.x / 32);
    const auto ask_next = [&] {
      ask(i < count ? list[i] : PagePlace{-1, 0});
      i += warps<dim>;
    };
    if (!asked_.exists()) ask_next();
    while (asked_.exists()) {
      const int index = asked_.index;
      take();
      ask_next();
      float score[4];
      keys_.scores(queries, score);
      if (!sight_.sees_all(index)) {
        mask_page([&](int slot) { return sight_.stretch.sees(index * kv_page_tokens + slot); }, score, values_);
      }
      running.weigh(score, factor_, values_);
      running.add(values_, score);
    }
  }

 private:
  static constexpr bool copies = has_next_page<type, dim>;
  static constexpr int key_bytes = kv_head_page_bytes(type, dim);

  __device__ void take() {
    if constexpr (copies) {
      device::wait_async<0>();
      __syncwarp();
      const auto* const page = reinterpret_cast<const std::byte*>(next_.page);
      keys_.load(page);
      values_.load(page + key_bytes);
      __syncwarp();
    } else {
      keys_.load(head_.keys(asked_.place));
      values_.load(head_.values(asked_.place));
    }
  }

  Sight sight_;
  HeadPages<type, dim> head_;
  NextPage<type, dim>& next_;
  PagePlace asked_;
  PageKeys<type, dim> keys_;
  PageValues<type, dim> values_;
  float factor_;
};

}  // namespace w4q::kernels::decode
