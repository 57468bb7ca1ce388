// The stream-K fix-up of the GEMV: sums of a row group that warps and blocks share come together in the order of their
// tiles.
#pragma once

#include "kernels/frame/gemv_store.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::frame {

/// Sums that the warps of a block leave for one another: of the row group that a warp came from (`heads`) and of the
/// one that it ended in (`tails`), with the numbers of these groups, or −1. Tails stand where the table stood.
template <int rows, int warps>
struct Slots {
  static constexpr int values = 64 * rows;
  static constexpr int extra_bytes = warps * values * 4 + 2 * warps * 4;  ///< beyond the table
  float* heads;
  float* tails;
  int* groups;

  __device__ Slots(char* table, int table_bytes)
      : heads(reinterpret_cast<float*>(table + table_bytes)),
        tails(reinterpret_cast<float*>(table)),
        groups(reinterpret_cast<int*>(table + table_bytes + warps * values * 4)) {}
  __device__ float* sums_of(int slot) const { return (slot < warps ? heads : tails) + slot % warps * values; }
  __device__ void leave(int slot, int group) const {
    if (threadIdx.x % 32 == 0) groups[slot] = group;
  }
};

/// What a block must know to bring the sums of its row groups together; made before the sums are there.
struct Outline {
  int first_group, final_group;
  int first_sharer;   ///< the block that holds the first group's first tile
  bool shares_final;  ///< the final group goes on in the next block

  __device__ Outline(const Launch& args, const Deal& blocks) {
    const int begin = blocks.begin(blockIdx.x);
    const int end = blocks.begin(blockIdx.x + 1);
    first_group = begin / args.col_groups;
    final_group = (end - 1) / args.col_groups;
    first_sharer = blocks.holder(first_group * args.col_groups);
    shares_final = end < (final_group + 1) * args.col_groups;
  }
};

/// Sums of the row groups that several warps share, and their way out: 64 sums of one group at a time for a warp, those
/// that another block waits for first.
template <class Type, bool fused, int rows, int warps>
__device__ void combine(const Launch& args, const Outline& outline, const Slots<rows, warps>& slots) {
  const int lane = threadIdx.x % 32;
  const int tasks = (outline.final_group - outline.first_group + 1) * rows;
  for (int task = threadIdx.x / 32; task < tasks; task += warps) {
    const int group = outline.final_group - task / rows;
    const int first = 64 * (task % rows) + lane;
    static_assert(2 * warps <= 32);
    const unsigned members = __ballot_sync(0xFFFFFFFFu, lane < 2 * warps && slots.groups[lane] == group);
    if (members == 0) continue;  // stored by the warp that had all of it
    const GroupStore<Type, fused> store(args, group);
    // No branches: all loads are on their way before the first is added.
    float sums[2] = {};
#pragma unroll
    for (int slot = 0; slot < 2 * warps; ++slot) {
      const bool member = (members >> slot & 1) != 0;
      sums[0] += member ? slots.sums_of(slot)[first] : 0;
      sums[1] += member ? slots.sums_of(slot)[first + 32] : 0;
    }
    const auto mailbox = [&](int block) { return args.packets + static_cast<int64_t>(block) * 64 * rows + first; };
    if (group == outline.final_group && outline.shares_final) {
      send(mailbox(blockIdx.x), sums[0]);
      send(mailbox(blockIdx.x) + 32, sums[1]);
      continue;
    }
    if (group == outline.first_group) {
      float total[2] = {};
      for (int block = outline.first_sharer; block < static_cast<int>(blockIdx.x); ++block) {
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
