// The stream-K fix-up of the GEMV: sums of an N-tile that warps and blocks share come together in the order of their
// tiles.
#pragma once

#include "kernels/frame/gemv_store.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::frame {

/// Sums that the warps of a block leave for one another: of the N-tile that a warp came from (`heads`) and of the
/// one that it ended in (`tails`), with the numbers of these groups, or −1. Tails stand where the table stood.
template <int rows, int warps>
struct PartialSums {
  static constexpr int values = 64 * rows;
  static constexpr int extra_bytes = warps * values * 4 + 2 * warps * 4;  ///< beyond the table
  float* heads;
  float* tails;
  int* groups;

  __device__ PartialSums(char* table, int table_bytes)
      : heads(reinterpret_cast<float*>(table + table_bytes)),
        tails(reinterpret_cast<float*>(table)),
        groups(reinterpret_cast<int*>(table + table_bytes + warps * values * 4)) {}
  __device__ float* sums_of(int slot) const { return (slot < warps ? heads : tails) + slot % warps * values; }
  __device__ void leave(int slot, int group) const {
    if (threadIdx.x % 32 == 0) groups[slot] = group;
  }
};

/// What a block must know to bring the sums of its N-tiles together; made before the sums are there.
struct FixUp {
  int first_group, final_group;
  int first_sharer;   ///< the block that holds the first group's first tile
  bool shares_final;  ///< the final group goes on in the next block

  /// Of groups of so many tiles.
  __device__ FixUp(int group_tiles, const Partition& blocks) {
    const int begin = blocks.begin(blockIdx.x);
    const int end = blocks.begin(blockIdx.x + 1);
    first_group = begin / group_tiles;
    final_group = (end - 1) / group_tiles;
    first_sharer = blocks.holder(first_group * group_tiles);
    shares_final = end < (final_group + 1) * group_tiles;
  }
  __device__ FixUp(const Launch& args, const Partition& blocks) : FixUp(args.k_tiles, blocks) {}
};

/// Sums of the N-tiles that several warps share, and their way out: 64 sums of one group at a time for a warp, those
/// that another block waits for first.
template <class Type, bool fused, int rows, int warps, class Args>
__device__ void fix_up(const Args& args, const FixUp& plan, const PartialSums<rows, warps>& partial) {
  const int lane = threadIdx.x % 32;
  const int tasks = (plan.final_group - plan.first_group + 1) * rows;
#pragma unroll 1
  for (int task = threadIdx.x / 32; task < tasks; task += warps) {
    const int group = plan.final_group - task / rows;
    const int first = 64 * (task % rows) + lane;
    static_assert(2 * warps <= 32);
    const unsigned members = __ballot_sync(0xFFFFFFFFu, lane < 2 * warps && partial.groups[lane] == group);
    if (members == 0) continue;  // stored by the warp that had all of it
    const GroupStore<Type, fused> store(args, group);
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
    if (group == plan.first_group) {
      float total[2] = {};
#pragma unroll 1
      for (int block = plan.first_sharer; block < static_cast<int>(blockIdx.x); ++block) {
        receive(mailbox(block), 32, total);
      }
      sums[0] += total[0];
      sums[1] += total[1];
    }
    if constexpr (fused) {
      store.run({sums[0], sums[1]});
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
