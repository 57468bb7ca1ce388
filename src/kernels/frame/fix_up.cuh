// The stream-K fix-up of the GEMV: sums of an N-tile that warps and blocks share come together in the order of their
// tiles.
#pragma once

#include "kernels/frame/gemv_store.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::frame {

/// A Partition of units of 1 << shift tiles, which stay together.
struct UnitPartition {
  Partition units;
  int shift;
  __device__ int begin(int part) const { return units.begin(part) << shift; }
};

/// receive() from `senders` blocks, `apart` words from one to the next, in their order; four are asked for together.
template <int count>
__device__ __forceinline__ void receive_each(MailboxWord* from, int64_t apart, int senders, int stride,
                                             float (&sums)[count]) {
  constexpr int at_once = 4;
#pragma unroll 1
  for (int done = 0; done < senders; done += at_once, from += at_once * apart) {
    MailboxWord words[at_once][count];
    bool complete = false;
    while (!complete) {
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
#pragma unroll
        for (int j = 0; j < count; ++j) words[i][j] = done + i < senders ? peek(from + i * apart + j * stride) : ~0ull;
      }
      complete = true;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
#pragma unroll
        for (int j = 0; j < count; ++j) complete &= words[i][j] >> 32 != 0;
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (done + i >= senders) break;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        from[i * apart + j * stride] = 0;
        sums[j] += __uint_as_float(static_cast<uint32_t>(words[i][j]));
      }
    }
  }
}

/// Sums that the warps of a block leave for one another: of the N-tile that a warp came from (`heads`) and of the
/// one that it ended in (`tails`), with the numbers of these groups, or −1. Tails stand where the table stood; or, `apart`,
/// in memory of their own: then they can be left while others still look things up.
template <int rows, int warps, bool apart = false>
struct PartialSums {
  static constexpr int values = 64 * rows;
  static constexpr int sum_bytes = warps * values * 4;
  static constexpr int extra_bytes = (apart ? 2 : 1) * sum_bytes + 2 * warps * 4;  ///< beyond the table
  float* heads;
  float* tails;
  int* groups;

  __device__ PartialSums(char* table, int table_bytes)
      : heads(reinterpret_cast<float*>(table + table_bytes)),
        tails(reinterpret_cast<float*>(apart ? table + table_bytes + sum_bytes : table)),
        groups(reinterpret_cast<int*>(table + table_bytes + (apart ? 2 : 1) * sum_bytes)),
        table_(reinterpret_cast<float*>(table)) {}
  __device__ float* sums_of(int slot) const { return (slot < warps ? heads : tails) + slot % warps * values; }
  /// Where the table was, behind tails: what a TailProduct takes of each group that the block stores.
  __device__ float* kept(int slot) const { return table_ + (warps + slot) * values; }
  __device__ void leave(int slot, int group) const {
    if (threadIdx.x % 32 == 0) groups[slot] = group;
  }

 private:
  float* table_;
};

/// What a block must know to bring the sums of its N-tiles together; made before the sums are there.
struct FixUp {
  int first_group, final_group;
  int first_sharer;   ///< the block that holds the first group's first tile
  bool shares_final;  ///< the final group goes on in the next block

  /// Groups from the first to before this one are stored by this block, but for those that one warp has all of.
  __device__ int past_stored() const { return final_group + (shares_final ? 0 : 1); }

  /// Of groups of so many tiles.
  template <class Blocks>
  __device__ FixUp(int group_tiles, const Blocks& blocks) {
    const int begin = blocks.begin(blockIdx.x);
    const int end = blocks.begin(blockIdx.x + 1);
    first_group = begin / group_tiles;
    final_group = (end - 1) / group_tiles;
    first_sharer = blocks.holder(first_group * group_tiles);
    shares_final = end < (final_group + 1) * group_tiles;
  }
  __device__ FixUp(const Launch& args, const Partition& blocks) : FixUp(args.k_tiles, blocks) {}
  /// The same without divisions; `by_group` divides by group_tiles.
  __device__ FixUp(int group_tiles, const Divider& by_group, const UnitPartition& blocks) {
    const int begin = blocks.begin(blockIdx.x);
    const int end = blocks.begin(blockIdx.x + 1);
    first_group = by_group.quotient(begin);
    final_group = by_group.quotient(end - 1);
    first_sharer = static_cast<int>(blockIdx.x);
    while (blocks.begin(first_sharer) > first_group * group_tiles) --first_sharer;
    shares_final = end < (final_group + 1) * group_tiles;
  }
};

/// What stores N-tile `group` of one row; not `exists`: is asked for nothing.
template <class Type, bool fused, class Args, class Partial>
__device__ __forceinline__ GroupStore<Type, fused> store_of(const Args& args, const FixUp& plan, const Partial& partial,
                                                            int group, bool exists = true) {
  const bool keeps = args.fusion.tail.weight != nullptr;
  return {args, group, keeps ? partial.kept(group - plan.first_group) : nullptr, exists};
}

/// Sums of the N-tiles that several warps share, and their way out: 64 sums of one group at a time for a warp, those
/// that another block waits for first. `prepared`: `store` is that of the warp's first group, final_group − warp.
template <class Type, bool fused, int rows, int warps, bool prepared = false, class Args, bool apart>
__device__ void fix_up(const Args& args, const FixUp& plan, const PartialSums<rows, warps, apart>& partial,
                       [[maybe_unused]] GroupStore<Type, fused> store = {}) {
  const int lane = threadIdx.x % 32;
  const int tasks = (plan.final_group - plan.first_group + 1) * rows;
#pragma unroll 1
  for (int task = threadIdx.x / 32; task < tasks; task += warps) {
    const int group = plan.final_group - task / rows;
    const int first = 64 * (task % rows) + lane;
    static_assert(2 * warps <= 32);
    const unsigned members = __ballot_sync(0xFFFFFFFFu, lane < 2 * warps && partial.groups[lane] == group);
    if (members == 0) continue;  // stored by the warp that had all of it
    if constexpr (fused) {
      if (!prepared || task >= warps) store = store_of<Type, fused>(args, plan, partial, group);
    }
    // No branches: all loads are on their way before the first is added.
    float sums[2] = {};
#pragma unroll
    for (int slot = 0; slot < 2 * warps; ++slot) {
      const bool member = (members >> slot & 1) != 0;
      sums[0] += member ? partial.sums_of(slot)[first] : 0;
      sums[1] += member ? partial.sums_of(slot)[first + 32] : 0;
    }
    const auto mailbox = [&](int block) { return args.mailboxes + static_cast<int64_t>(block) * 64 * rows + first; };
    if (group == plan.final_group && plan.shares_final) {
      send(mailbox(blockIdx.x), sums[0]);
      send(mailbox(blockIdx.x) + 32, sums[1]);
      continue;
    }
    float factor = 1;
    if constexpr (fused) factor = store.factor(args);  // while others' sums are on their way
    if (group == plan.first_group) {
      float total[2] = {};
      const int own = static_cast<int>(blockIdx.x);
      if constexpr (rows < 16) {
        receive_each(mailbox(plan.first_sharer), 64 * rows, own - plan.first_sharer, 32, total);
      } else {
        // There are no registers for words of several blocks.
#pragma unroll 1
        for (int block = plan.first_sharer; block < own; ++block) receive(mailbox(block), 32, total);
      }
      sums[0] += total[0];
      sums[1] += total[1];
    }
    if constexpr (fused) {
      store.run(args, {sums[0], sums[1]}, factor);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int v = first + 32 * i;
        store_output<Type>(args, group * 64 + v / rows, v % rows, sums[i]);
      }
    }
  }
}

}  // namespace w4q::kernels::frame
