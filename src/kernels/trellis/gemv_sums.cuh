// What the GEMVs of trellises do with sums: those of a group, a strip or a strip of gates and the one of their ups, that
// warps and blocks share come together in a fixed order, across blocks by mailboxes, and all go the way of
// frame/gemv_store.cuh.
#pragma once

#include "kernels/frame/gemv_block.cuh"
#include "kernels/trellis/launch.cuh"

namespace w4q::kernels::trellis {

/// Sums of a group.
template <bool gated>
inline constexpr int group_outputs = static_cast<int>(Map::tile_rows) * (gated ? 2 : 1);

/// Sums that the warps of a block leave for one another, as frame::PartialSums: of the group that a warp came from
/// (slots 0 … warps − 1), and of the one that it ended in.
template <int warps, int values>
struct WarpSums {
  static constexpr int bytes = 2 * warps * (values + 1) * 4;
  float* sums;
  int* groups;

  __device__ explicit WarpSums(char* memory)
      : sums(reinterpret_cast<float*>(memory)), groups(reinterpret_cast<int*>(memory) + 2 * warps * values) {}
  __device__ float* of(int slot) const { return sums + slot * values; }
  __device__ void leave(int slot, int group) const {
    if (threadIdx.x % 32 == 0) groups[slot] = group;
  }
};

/// The outputs of one of the parts of 64 in which a group is stored: a lane has two.
template <bool gated>
struct Part {
  int low, high;      ///< among the group's sums
  int row, high_row;  ///< of the weight
  int group;          ///< of 64 outputs that are stored, or 64 gates and ups
  static constexpr int count = gated ? 4 : 2;

  __device__ Part(const TrellisLaunch& args, int group_, int part) : group(count * group_ + part) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (gated) {
      const bool up = lane / gate_up_turn % 2 != 0;
      const int at = 32 * part + lane / 16 * gate_up_turn + lane % gate_up_turn;
      low = at + (up ? 128 : 0);
      high = low + 16;
      row = 128 * group_ + at + (up ? static_cast<int>(args.n) / 2 : 0);
      high_row = row + 16;
    } else {
      low = 64 * part + lane;
      high = low + 32;
      row = 64 * group + lane;
      high_row = row + 32;
    }
  }
  __device__ bool exists(const TrellisLaunch& args) const { return gated || 64 * group < args.n; }
  __device__ auto store(const TrellisLaunch& args) const {
    return frame::GroupStore<device::HalfType, true>(args, group, row, high_row);
  }
};

/// Brings to the L2 cache the scales of the outputs that a block stores, a line for each strip. By a warp.
template <bool gated>
__device__ __forceinline__ void prefetch_scales(const TrellisLaunch& args, const frame::FixUp& plan) {
  constexpr int strips = gated ? 2 : 1;
  const int groups = args.n_tiles / strips;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 32; i < strips * (plan.final_group - plan.first_group + 1); i += 32) {
    const int strip = plan.first_group + i / strips + i % strips * groups;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const __half*>(args.output_scales) + 128 * strip));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const __half*>(args.output_scales) + 128 * strip + 64));
  }
}

/// Brings the sums together that warps and blocks share, and stores them.
template <bool gated, int warps>
__device__ void fix_up(const TrellisLaunch& args, const frame::FixUp& plan,
                       const WarpSums<warps, group_outputs<gated>>& partial) {
  using Part = trellis::Part<gated>;
  constexpr int values = group_outputs<gated>;
  static_assert(2 * warps <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tasks = (plan.final_group - plan.first_group + 1) * Part::count;
#pragma unroll 1
  for (int task = static_cast<int>(threadIdx.x) / 32; task < tasks; task += warps) {
    const int group = plan.final_group - task / Part::count;
    const unsigned members = __ballot_sync(0xFFFFFFFFu, lane < 2 * warps && partial.groups[lane] == group);
    const Part part(args, group, task % Part::count);
    if (members == 0 || !part.exists(args)) continue;
    const auto store = part.store(args);
    float sums[2] = {};
    constexpr int at_once = 8;  // no branches between these loads
    static_assert(2 * warps % at_once == 0);
#pragma unroll 1
    for (int first = 0; first < 2 * warps; first += at_once) {
      if ((members >> first & ((1u << at_once) - 1)) == 0) continue;
#pragma unroll
      for (int slot = first; slot < first + at_once; ++slot) {
        const bool member = (members >> slot & 1) != 0;
        sums[0] += member ? partial.of(slot)[part.low] : 0;
        sums[1] += member ? partial.of(slot)[part.high] : 0;
      }
    }
    const auto mailbox = [&](int block) { return args.mailboxes + static_cast<int64_t>(block) * values + part.low; };
    const int apart = part.high - part.low;
    if (group == plan.final_group && plan.shares_final) {
      frame::send(mailbox(static_cast<int>(blockIdx.x)), sums[0]);
      frame::send(mailbox(static_cast<int>(blockIdx.x)) + apart, sums[1]);
      continue;
    }
    const float factor = store.factor(args);  // while others' sums are on their way
    if (group == plan.first_group) {
      float total[2] = {};
      const int senders = static_cast<int>(blockIdx.x) - plan.first_sharer;
      frame::receive_each(mailbox(plan.first_sharer), values, senders, apart, total);
      sums[0] += total[0];
      sums[1] += total[1];
    }
    store.run(args, {sums[0], sums[1]}, factor);
  }
}

}  // namespace w4q::kernels::trellis
