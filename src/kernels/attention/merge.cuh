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

/// Joins what `others` blocks sent, `stride` words apart, as it arrives: they have lower indices, and so are running or
/// done. `at_once` words of each of `pairs` pairs of dims, `apart` words from one to the next, are asked for together; of
/// the first `count` of them.
template <int at_once, int pairs>
__device__ void join_blocks(frame::MailboxWord* from, int stride, int others, int apart, int count,
                            Join (&joins)[pairs]) {
  for (int done = 0; done < others; done += at_once) {
    frame::MailboxWord* const at = from + done * stride;
    const int left = others - done;
    frame::MailboxWord words[pairs][at_once];
    bool complete = false;
    while (!complete) {
      complete = true;
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          words[pair][i] = pair < count && i < left ? frame::peek(at + pair * apart + i * stride) : ~0ull;
        }
      }
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) complete &= words[pair][i] >> 32 != 0;
      }
    }
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      if (pair >= count) break;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (i < left) at[pair * apart + i * stride] = 0;
      }
      joins[pair].add(words[pair], left);
    }
  }
}

/// The blocks that share pages, and what each of them has.
template <int dim, class Space>
struct Merging {
  static constexpr int half = dim / 2, stride = tile_heads * half;
  const Task& task;
  const BlockHeads& heads;
  const Sharers& sharers;
  const Space (&spaces)[warps<dim>];

  /// Words of a block.
  __device__ frame::MailboxWord* mailbox(int split) const {
    return task.mailboxes + (static_cast<int64_t>(blockIdx.x * gridDim.y) + sharers.block(split)) * stride;
  }
  __device__ int values() const { return heads.count * half; }
  __device__ Mean own(int i) const { return block_mean<dim>(spaces, i / half, i % half); }
  __device__ void send(int i, const Mean& mean) const { send_mean(mailbox(sharers.split) + i, mean); }
  __device__ void store(int i, Join& join) const {
    const int head = i / half, d = i % half, head_dim = task.layer.head_dim;
    __half* const out = task.out + int64_t{heads.first + head} * head_dim;
    if (task.sinks != nullptr) join.add_sink(task.sinks[heads.first + head] * log2_e);
    if (d < head_dim) out[d] = __float2half_rn(__fdividef(join.low, join.weight));
    if (d + half < head_dim) out[d + half] = __float2half_rn(__fdividef(join.high, join.weight));
  }
};

/// All but the last of `active` blocks hand their means to it.
template <int dim, class Space>
__device__ __forceinline__ void merge_few(const Merging<dim, Space>& merging, int active) {
  const Sharers& sharers = merging.sharers;
  for (int i = static_cast<int>(threadIdx.x); i < merging.values(); i += threads<dim>) {
    const Mean own = merging.own(i);
    if (sharers.split + 1 < active) {
      merging.send(i, own);
      continue;
    }
    Join join[1] = {Join(own)};
    frame::MailboxWord* const from = merging.mailbox(0) + i;
    const int step = sharers.apart * Merging<dim, Space>::stride;
    if (active <= 5) {
      join_blocks<4>(from, step, active - 1, 0, 1, join);
    } else {
      join_blocks<16>(from, step, active - 1, 0, 1, join);
    }
    merging.store(i, join[0]);
  }
}

/// Of more blocks than can be joined in two batches of 16, eight are brought together at a time.
inline constexpr int most_at_once = 33, joined_at_once = 8;

/// All but every eighth of `active` blocks hand their means to that, which hands on what eight have to the last. A thread
/// joins two pairs of dims at a time.
template <int dim, class Space>
__device__ __forceinline__ void merge_many(const Merging<dim, Space>& merging, int active) {
  constexpr int group = joined_at_once, apart = threads<dim>;
  const Sharers& sharers = merging.sharers;
  const int place = sharers.split % group, step = sharers.apart * Merging<dim, Space>::stride;
  const bool last = sharers.split + 1 == active;
  for (int i = static_cast<int>(threadIdx.x); i < merging.values(); i += 2 * apart) {
    const int second = i + apart, count = second < merging.values() ? 2 : 1;
    Join joins[2] = {Join(merging.own(i)), Join(merging.own(count > 1 ? second : i))};
    if (last || place + 1 == group) {
      join_blocks<group>(merging.mailbox(sharers.split - place) + i, step, place, apart, count, joins);
    }
    if (last) {
      join_blocks<group>(merging.mailbox(group - 1) + i, group * step, sharers.split / group, apart, count, joins);
      merging.store(i, joins[0]);
      if (count > 1) merging.store(second, joins[1]);
    } else {
      merging.send(i, joins[0].mean());
      if (count > 1) merging.send(second, joins[1].mean());
    }
  }
}

/// Brings the `active` first of the blocks that share pages together. Where they are many, what waits for words waits
/// twice, not once for every 16 blocks; the way of few is as it was without them: it is code that runs once a launch.
template <int dim, class Space>
__device__ void merge(const Task& task, const BlockHeads& heads, const Sharers& sharers, int active,
                      const Space (&spaces)[warps<dim>]) {
  const Merging<dim, Space> merging{task, heads, sharers, spaces};
  if (active > most_at_once) return merge_many(merging, active);
  merge_few(merging, active);
}

}  // namespace w4q::kernels::decode
