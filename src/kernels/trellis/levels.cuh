// Levels of trellises as operands of mma.m16n8k16 over f16, exactly: dp4a adds the four bytes of a product up on top of
// the bits of 1024, and two columns make a register. What stands on top of a level, times the sum of the inputs, is taken
// off in the end; a row tile of ones makes that sum.
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
  float sums[groups][8][4];
  float inputs[groups][4];

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
    for (auto& group : inputs) {
#pragma unroll
      for (float& sum : group) sum = 0;
    }
  }
  /// Four columns of every lane, two and two, with the activations of these.
  template <class Codes>
  __device__ __forceinline__ void multiply(const ColumnPair<Codes>& low, const ColumnPair<Codes>& high, uint32_t mask,
                                           const uint2 (&b)[groups]) {
    constexpr uint32_t one = 0x3C003C00u, ones[4] = {one, one, one, one};
#pragma unroll
    for (int group = 0; group < groups; ++group) device::HalfType::mma(inputs[group], ones, b[group].x, b[group].y);
    unroll<8>([&]<int r>() {
      const uint32_t a[4] = {levels<2 * r>(low, mask), levels<2 * r + 1>(low, mask), levels<2 * r>(high, mask),
                             levels<2 * r + 1>(high, mask)};
#pragma unroll
      for (int group = 0; group < groups; ++group) device::HalfType::mma(sums[group][r], a, b[group].x, b[group].y);
    });
  }
};

}  // namespace w4q::kernels::trellis
