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

/// Four sums in 16 bytes, each a mark by itself: the complement of its bits, zero while empty. No sum has all bits set:
/// the not-a-number of additions lacks the sign.
__device__ __forceinline__ void send(uint4* to, const float (&sums)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(~__float_as_uint(sums[0])),
               "r"(~__float_as_uint(sums[1])), "r"(~__float_as_uint(sums[2])), "r"(~__float_as_uint(sums[3]))
               : "memory");
}
__device__ __forceinline__ uint4 peek(const uint4* from) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
__device__ __forceinline__ bool are_there(const uint4& words) {
  return words.x != 0 && words.y != 0 && words.z != 0 && words.w != 0;
}
__device__ __forceinline__ void add_sums(const uint4& words, float (&to)[4]) {
  to[0] += __uint_as_float(~words.x);
  to[1] += __uint_as_float(~words.y);
  to[2] += __uint_as_float(~words.z);
  to[3] += __uint_as_float(~words.w);
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
