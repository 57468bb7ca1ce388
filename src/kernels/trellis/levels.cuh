// Levels of trellises as operands of mma.m16n8k16 over f16, exactly: dp4a adds the four bytes of a product up on top of
// the bits of 1024, and two columns make a register. What stands on top of a level, times the sum of the inputs, is taken
// off in the end; a product with ones makes that sum.
#pragma once

#include "device/fragment.cuh"
#include "kernels/trellis/windows.cuh"

namespace w4q::kernels::trellis {

constexpr float level_offset = 1024.0f + formats::trellis_largest_level;

/// The levels of two columns in a row of the lane's as two f16, `level_offset` above. Shifts by both pipes: the
/// multiplier has dot products beside the code's multiplications here.
template <int row, class Codes>
__device__ __forceinline__ uint32_t levels(const ColumnPair<Codes>& columns, uint32_t mask) {
  const uint32_t low = __dp4a(columns.template product<row, Shifts::by_both>(0, mask), 0x01010101u, 0x6400u);
  const uint32_t high = __dp4a(columns.template product<row, Shifts::by_both>(1, mask), 0x01010101u, 0x6400u);
  return permute(low, high, 0x5410);
}

/// A warp's products of a strip with rows of activations, eight to a group: of row tile r, and of one of ones.
template <int groups>
struct LevelSums {
  static_assert(groups == 1 || groups == 2);
  float sums[groups][8][4];
  float inputs[4];  ///< of rows: lane 4·g + t has those of row g, and from [2] on of row 8 + g

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& group : sums) {
#pragma unroll
      for (auto& tile : group) {
#pragma unroll
        for (float& sum : tile) sum = 0;
      }
    }
#pragma unroll
    for (float& sum : inputs) sum = 0;
  }
  /// The sum of the inputs of row 8 · group + 2 · t + column, in lanes 4·g + t. By a whole warp.
  __device__ __forceinline__ float input_sum(int group, int column) const {
    const int row = 2 * (static_cast<int>(threadIdx.x) % 4) + column;
    return __shfl_sync(0xFFFFFFFFu, inputs[2 * group], 4 * row);
  }
  /// Four columns of every lane, two and two, with the activations of these.
  template <class Codes>
  __device__ __forceinline__ void multiply(const ColumnPair<Codes>& low, const ColumnPair<Codes>& high, uint32_t mask,
                                           const uint2 (&b)[groups]) {
    // As operands of B the activations of eight rows stand as those of an A's upper or lower eight.
    constexpr uint32_t ones = 0x3C003C00u;
    constexpr int last = groups - 1;
    const uint32_t x[4] = {b[0].x, last == 0 ? 0 : b[last].x, b[0].y, last == 0 ? 0 : b[last].y};
    device::HalfType::mma(inputs, x, ones, ones);
    unroll<8>([&]<int r>() {
      const uint32_t a[4] = {levels<2 * r>(low, mask), levels<2 * r + 1>(low, mask), levels<2 * r>(high, mask),
                             levels<2 * r + 1>(high, mask)};
#pragma unroll
      for (int group = 0; group < groups; ++group) device::HalfType::mma(sums[group][r], a, b[group].x, b[group].y);
    });
  }
};

}  // namespace w4q::kernels::trellis
