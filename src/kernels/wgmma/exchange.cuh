// Sums that the blocks of a team hand to each other through global memory: pairs as 8-byte words, which are there as a
// whole or not at all.
#pragma once

#include <cstdint>

#include "kernels/wgmma/plan.h"

namespace w4q::kernels::wgmma {

/// Zero while empty. Words are empty between launches: whoever receives one empties it.
using MailboxPair = unsigned long long;

/// A pair whose first sum is 0 would be taken for an empty word: it travels as −0. The word is put together where the
/// compiler does not see it, which otherwise would keep sums in pairs of registers and wait for every product.
__device__ __forceinline__ void send(MailboxPair* to, float first, float second) {
  first = first == 0 ? -0.0f : first;
  asm volatile("{.reg .b64 word; mov.b64 word, {%1, %2}; st.relaxed.gpu.global.b64 [%0], word;}" ::"l"(to), "f"(first),
               "f"(second)
               : "memory");
}

__device__ __forceinline__ MailboxPair peek(const MailboxPair* from) {
  MailboxPair word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

/// Sums of `count` words each, `stride` apart, in their order: use(i, sum) for those of `lists` lists, the first at
/// `from`, the others `list_stride` apart, as soon as all are there. All are asked for at once, again and again: who
/// waits needs one trip to the L2 cache after the last has arrived.
template <int most_lists, int most, class Use>
__device__ __forceinline__ void receive(MailboxPair* from, int64_t stride, int count, int64_t list_stride, int lists,
                                        const Use& use) {
  MailboxPair words[most_lists][most];
  bool complete = false;
  while (!complete) {
    bool here = true;
#pragma unroll
    for (int list = 0; list < most_lists; ++list) {
#pragma unroll
      for (int i = 0; i < most; ++i) {
        words[list][i] = 1;
        if (list < lists && i < count) words[list][i] = peek(from + list * list_stride + i * stride);
        here &= words[list][i] != 0;
      }
    }
    complete = __all_sync(0xFFFFFFFFu, here);  // lanes stay together
  }
#pragma unroll
  for (int list = 0; list < most_lists; ++list) {
    if (list >= lists) break;
    float2 total = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= count) break;
      from[list * list_stride + i * stride] = 0;
      total.x += __uint_as_float(static_cast<uint32_t>(words[list][i]));
      total.y += __uint_as_float(static_cast<uint32_t>(words[list][i] >> 32));
    }
    use(list, total);
  }
}

}  // namespace w4q::kernels::wgmma
