// How the GEMV's sums come together: products as mma leaves them, scaled sums of a lane, sums that warps and blocks
// share.
#pragma once

#include "kernels/frame/gemv_store.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::kbit {

/// What the eight columns of an mma's B operand hold. One activation row: the blocks of four tiles, each in a column of
/// its own, so that 16 mma steps add up 256 inputs before a sum meets a scale. Four rows: the two blocks of a tile.
/// Eight rows: a column each, and the sums meet their scales after every block; sixteen take two such operands.
template <int rows>
struct Columns {
  static constexpr int tiles = rows == 1 ? 4 : 1;    ///< multiplied before their sums are scaled
  static constexpr int blocks = rows >= 8 ? 1 : 2;   ///< that have columns of their own
  static constexpr int groups = rows == 16 ? 2 : 1;  ///< operands of eight columns
  /// The lane's part of B is column `lane / 4`.
  __device__ static int row() { return threadIdx.x % 32 / 4 / (tiles * blocks); }
  __device__ static int tile() { return threadIdx.x % 32 / 4 / blocks % tiles; }
  __device__ static int block() { return threadIdx.x % 32 / 4 % blocks; }
  /// The tile whose sums the lane gets.
  __device__ static int sum_tile() { return threadIdx.x % 4 % tiles; }
};

__device__ __forceinline__ void set_zero(float& sum) { sum = 0; }
template <class Part, int count>
__device__ __forceinline__ void set_zero(Part (&parts)[count]) {
#pragma unroll
  for (Part& part : parts) set_zero(part);
}

/// fp32 sums of 64 outputs × 8 · groups columns as mma leaves them.
template <int groups>
struct Products {
  float sums[groups][Map::row_tiles][4];
  __device__ void clear() { set_zero(sums); }
};

/// Scaled sums of a lane: [row tile][half][activation rows that the lane has].
template <int rows>
struct Totals {
  static constexpr int groups = Columns<rows>::groups;
  static constexpr int per_lane = rows >= 8 ? 2 * groups : 1;
  float sums[Map::row_tiles][2][per_lane];

  __device__ void clear() { set_zero(sums); }

  /// Products whose columns 2t and 2t + 1 are two rows in block `block`.
  template <class Scales>
  __device__ void add_block(const Products<groups>& products, const typename Scales::Packed& scales, int block) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      const float2 scale = Scales::pair_of_sums(scales, block, r);
#pragma unroll
      for (int column = 0; column < per_lane; ++column) {
        const float* const products_of = products.sums[column / 2][r];
        sums[r][0][column] = fmaf(products_of[column % 2], scale.x, sums[r][0][column]);
        sums[r][1][column] = fmaf(products_of[2 + column % 2], scale.y, sums[r][1][column]);
      }
    }
  }
  /// Products whose columns 2t and 2t + 1 are the two blocks of a tile.
  template <class Scales>
  __device__ void add_tile(const Products<groups>& products, const typename Scales::Packed& scales) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float2 scale = Scales::pair_of_sums(scales, block, r);
        sums[r][0][0] = fmaf(products.sums[0][r][block], scale.x, sums[r][0][0]);
        sums[r][1][0] = fmaf(products.sums[0][r][2 + block], scale.y, sums[r][1][0]);
      }
    }
  }

  /// Calls use(output, activation row, sum) for what the lane has to give of a finished row group.
  template <class Use>
  __device__ void for_each(const Use& use) const {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (rows == 1) {
        use(16 * t + 8 * half + g, 0, sum_of_row_tile(half));
      } else {
#pragma unroll
        for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
          for (int column = 0; column < per_lane; ++column) {
            const int row = rows < 8 ? t : 8 * (column / 2) + 2 * t + column % 2;
            use(16 * r + 8 * half + g, row, sums[r][half][column]);
          }
        }
      }
    }
  }
  /// One row: outputs `lane` and `lane` + 32 of a finished row group. Lane 4g + t has outputs 16t + g and 16t + 8 + g.
  __device__ float2 pair() const {
    const float mine[2] = {sum_of_row_tile(0), sum_of_row_tile(1)};
    const int lane = threadIdx.x % 32;
    const int from = lane % 8 * 4 + lane / 16;
    const auto fetch = [&](int lane_of) {
      const float low = __shfl_sync(0xFFFFFFFFu, mine[0], lane_of);
      const float high = __shfl_sync(0xFFFFFFFFu, mine[1], lane_of);
      return lane / 8 % 2 == 0 ? low : high;
    };
    return {fetch(from), fetch(from + 2)};
  }

 private:
  /// One row: the four lanes t have sums of different columns. Lane t gets the whole sum of row tile t, in two steps in
  /// each of which a lane keeps half of what it has and gives away the other half.
  __device__ float sum_of_row_tile(int half) const {
    const bool upper = (threadIdx.x & 2) != 0;
    const bool odd = (threadIdx.x & 1) != 0;
    const auto part = [&](int r) { return sums[r][half][0]; };
    const float even_sum = (upper ? part(2) : part(0)) + __shfl_xor_sync(0xFFFFFFFFu, upper ? part(0) : part(2), 2);
    const float odd_sum = (upper ? part(3) : part(1)) + __shfl_xor_sync(0xFFFFFFFFu, upper ? part(1) : part(3), 2);
    return (odd ? odd_sum : even_sum) + __shfl_xor_sync(0xFFFFFFFFu, odd ? even_sum : odd_sum, 1);
  }
};

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

}  // namespace w4q::kernels::kbit
