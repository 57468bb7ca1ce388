// The GEMV's sums in registers: products as mma leaves them, scaled sums of a lane.
#pragma once

#include "kernels/frame/launch.cuh"

namespace w4q::kernels::frame {

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
  __device__ void scale(float factor) {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (auto& row_tile : sums[group]) {
#pragma unroll
        for (float& sum : row_tile) sum *= factor;
      }
    }
  }
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

  /// Calls use(output, activation row, sum) for what the lane has to give of a finished N-tile.
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
  /// One row: outputs `lane` and `lane` + 32 of a finished N-tile. Lane 4g + t has outputs 16t + g and 16t + 8 + g.
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

}  // namespace w4q::kernels::frame
