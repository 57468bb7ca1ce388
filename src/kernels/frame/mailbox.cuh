// Sums that the blocks of one launch hand to each other. A value and a mark travel in one 8-byte word of global memory,
// so that whoever waits needs one trip to the L2 cache and no fence: the word is there as a whole or not at all.
#pragma once

#include <cstdint>

namespace w4q::kernels::frame {

/// One word; zero while empty. Words are empty between launches: whoever receives one empties it.
using MailboxWord = unsigned long long;

__device__ __forceinline__ void send(MailboxWord* to, float value) {
  const MailboxWord word = static_cast<MailboxWord>(1) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ MailboxWord peek(const MailboxWord* from) {
  MailboxWord word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

/// Adds `count` words, `stride` apart, to `sums`, as soon as they are there. All are asked for at once, again and again:
/// one trip to the L2 cache after the last has arrived. The sender must be a block of a lower index: it is
/// running or done.
template <int count>
__device__ __forceinline__ void receive(MailboxWord* from, int stride, float (&sums)[count]) {
  MailboxWord words[count];
  bool complete = false;
  while (!complete) {
#pragma unroll
    for (int i = 0; i < count; ++i) words[i] = peek(from + i * stride);
    complete = true;
#pragma unroll
    for (int i = 0; i < count; ++i) complete &= words[i] >> 32 != 0;
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    from[i * stride] = 0;
    sums[i] += __uint_as_float(static_cast<uint32_t>(words[i]));
  }
}

}  // namespace w4q::kernels::frame
