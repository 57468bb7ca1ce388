// Sums of warps and of blocks that share a key head become one, in a fixed order. No fence, no counter: a block hands a
// mean over its tokens and the logarithm of its weight to the last one, two dims in a word that is there as a whole or
// not at all.
#pragma once

#include <cuda_fp16.h>

#include "device/fragment.cuh"
#include "kernels/attention/decode_parts.cuh"

namespace w4q::kernels::decode {

/// Dims d and d + dim/2 of a mean over tokens, and the logarithm of the tokens' weights.
struct Mean {
  float low, high, weight;
};

/// Sums of one warp.
template <int dim>
struct alignas(16) Partial {
  float reference[tile_heads];  ///< score, in units of log2
  float weight[tile_heads];     ///< Σ 2^(score − reference)
  float sums[tile_heads][dim + 4];
};

/// Of what the warps of the block have together; nothing at all has a weight far below every other.
template <int dim, class Space>
__device__ Mean block_mean(const Space (&spaces)[warps<dim>], int head, int d) {
  float largest = lowest;
#pragma unroll
  for (const auto& space : spaces) largest = fmaxf(largest, space.partial.reference[head]);
  float weight = 1e-37f;
  float low = 0;
  float high = 0;
#pragma unroll
  for (const auto& space : spaces) {
    const Partial<dim>& partial = space.partial;
    const float factor = power_of_two(partial.reference[head] - largest);
    weight = fmaf(factor, partial.weight[head], weight);
    low = fmaf(factor, partial.sums[head][d], low);
    high = fmaf(factor, partial.sums[head][d + dim / 2], high);
  }
  return {__fdividef(low, weight), __fdividef(high, weight), largest + __log2f(weight)};
}

/// A mean as one word: there as a whole or not at all. Values are rounded to f16; the upper half is never zero.
__device__ __forceinline__ void send_mean(frame::MailboxWord* to, const Mean& mean) {
  const float weight = mean.weight == 0 ? 1e-30f : mean.weight;
  const frame::MailboxWord word =
      static_cast<frame::MailboxWord>(__float_as_uint(weight)) << 32 | device::HalfType::pack(mean.low, mean.high);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/// Joins means: a running value is divided at the end.
struct Join {
  float largest, weight, low, high;

  __device__ explicit Join(const Mean& own) : largest(own.weight), weight(1), low(own.low), high(own.high) {}

  __device__ Mean mean() const {
    return {__fdividef(low, weight), __fdividef(high, weight), largest + __log2f(weight)};
  }

  /// What has a weight and no value; `logit` in units of log2.
  __device__ void add_sink(float logit) {
    const float highest = fmaxf(largest, logit);
    const float factor = power_of_two(largest - highest);
    largest = highest;
    weight = fmaf(weight, factor, power_of_two(logit - highest));
    low *= factor, high *= factor;
  }

  /// The first `count` of some words, in their order.
  template <int most>
  __device__ void add(const frame::MailboxWord (&words)[most], int count) {
    float highest = largest;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i < count) highest = fmaxf(highest, __uint_as_float(static_cast<uint32_t>(words[i] >> 32)));
    }
    const float factor = power_of_two(largest - highest);
    largest = highest;
    weight *= factor, low *= factor, high *= factor;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= count) break;
      const float share = power_of_two(__uint_as_float(static_cast<uint32_t>(words[i] >> 32)) - highest);
      const auto bits = static_cast<uint32_t>(words[i]);
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits));
      weight += share;
      low = fmaf(share, pair.x, low);
      high = fmaf(share, pair.y, high);
    }
  }
};

/// A thread joins so many pairs of dims at once, `threads` words apart: whoever waits for words of both waits once.
inline constexpr int pairs_at_once = 2;
template <class T>
using Pairs = T[pairs_at_once];

/// Joins what `others` blocks sent, `stride` words apart, as it arrives: they have lower indices, and so are running or
/// done. `at_once` words of each of the first `pairs` pairs, `apart` words from one to the next, are asked for together.
template <int at_once>
__device__ void join_blocks(frame::MailboxWord* from, int stride, int others, int pairs, int apart,
                            Pairs<Join>& joins) {
  for (int done = 0; done < others; done += at_once) {
    frame::MailboxWord* const at = from + done * stride;
    const int count = others - done;
    Pairs<frame::MailboxWord[at_once]> words;
    bool complete = false;
    while (!complete) {
      complete = true;
#pragma unroll
      for (int pair = 0; pair < pairs_at_once; ++pair) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          words[pair][i] = pair < pairs && i < count ? frame::peek(at + pair * apart + i * stride) : ~0ull;
        }
      }
#pragma unroll
      for (int pair = 0; pair < pairs_at_once; ++pair) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) complete &= words[pair][i] >> 32 != 0;
      }
    }
#pragma unroll
    for (int pair = 0; pair < pairs_at_once; ++pair) {
      if (pair >= pairs) break;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (i < count) at[pair * apart + i * stride] = 0;
      }
      joins[pair].add(words[pair], count);
    }
  }
}

/// Of more blocks than can be joined in two batches of 16, eight are brought together at a time.
inline constexpr int most_at_once = 33, joined_at_once = 8;

/// Brings the `active` first of the blocks that share pages together: all but the last hand their means to it, or, where
/// they are many, to every eighth, which hands on what eight have. What waits for words then waits twice, not once for
/// every 16 blocks.
template <int dim, class Space>
__device__ void merge(const Task& task, const BlockHeads& heads, const Sharers& sharers, int active,
                      const Space (&spaces)[warps<dim>]) {
  constexpr int half = dim / 2, stride = tile_heads * half, apart = threads<dim>;
  const int head_dim = task.layer.head_dim;
  frame::MailboxWord* const mailboxes = task.mailboxes + static_cast<int64_t>(blockIdx.y * gridDim.x) * stride;
  __half* const out = task.out + int64_t{heads.first} * head_dim;
  const int step = sharers.apart * stride;
  const bool last = sharers.split + 1 == active;
  const int group = active > most_at_once ? joined_at_once : active;
  const int place = sharers.split % group;
  const bool joins_others = last || place + 1 == group;
  const int values = heads.count * half;
  for (int first = static_cast<int>(threadIdx.x); first < values; first += pairs_at_once * apart) {
    const int pairs = min((values - first + apart - 1) / apart, pairs_at_once);
    const auto head_of = [&](int pair) { return (first + pair * apart) / half; };
    const auto dim_of = [&](int pair) { return (first + pair * apart) % half; };
    const auto own = [&](int pair) {
      return block_mean<dim>(spaces, head_of(min(pair, pairs - 1)), dim_of(min(pair, pairs - 1)));
    };
    Pairs<Join> joins = {Join(own(0)), Join(own(1))};
    const auto send = [&] {
#pragma unroll
      for (int pair = 0; pair < pairs_at_once; ++pair) {
        if (pair >= pairs) break;
        send_mean(mailboxes + sharers.block(sharers.split) * stride + first + pair * apart, joins[pair].mean());
      }
    };
    if (!joins_others) {
      send();
      continue;
    }
    frame::MailboxWord* const from = mailboxes + sharers.block(sharers.split - place) * stride + first;
    if (place <= 4) {
      join_blocks<4>(from, step, place, pairs, apart, joins);
    } else if (place < joined_at_once) {
      join_blocks<joined_at_once>(from, step, place, pairs, apart, joins);
    } else {
      join_blocks<16>(from, step, place, pairs, apart, joins);
    }
    if (!last) {
      send();
      continue;
    }
    if (active > group) {
      join_blocks<joined_at_once>(mailboxes + sharers.block(group - 1) * stride + first, group * step,
                                  sharers.split / group, pairs, apart, joins);
    }
#pragma unroll
    for (int pair = 0; pair < pairs_at_once; ++pair) {
      if (pair >= pairs) break;
      Join& join = joins[pair];
      const int head = head_of(pair), d = dim_of(pair);
      if (task.sinks != nullptr) join.add_sink(task.sinks[heads.first + head] * log2_e);
      if (d < head_dim) out[int64_t{head} * head_dim + d] = __float2half_rn(__fdividef(join.low, join.weight));
      if (d + half < head_dim) {
        out[int64_t{head} * head_dim + d + half] = __float2half_rn(__fdividef(join.high, join.weight));
      }
    }
  }
}

}  // namespace w4q::kernels::decode
