// x ← R · x by one warp, in the registers from which mma multiplies it: no shared memory, no shuffles, nothing that
// other warps wait for.
//
// Input 8·lane + j of 256 is in half j of the lane's four words: the order in which the GEMV's B operands have it. With
// its index written in bits, [g2 g1 g0] [t1 t0] [j2 j1 j0] and lane = 4·g + t, butterflies of t, j1 and j0 are a
// product with H_16 from the left, B having these bits along k and g along its columns. The sums come out transposed: g
// along a lane's rows. A second product, with the butterflies of j2 and of as much of g as the block reaches into,
// turns them back, so that every input is again where it was.
//
// Entries are powers of two; what is missing from 1 / √block is √2 or nothing (FragmentRotation::scale). Products are
// exact but for the fp32 sums; values are rounded to f16 between the two and at the end.
#pragma once

#include "device/fragment.cuh"

namespace w4q::kernels::rotated {

/// A lane's eight of 256 inputs of a row, and a word whose bits 15 − i and 31 − i, after a shift by 4·t, negate the two
/// inputs of word i (rotation_signs).
struct RawInputs {
  uint4 x;
  uint32_t signs;
};

class FragmentRotation {
 public:
  /// Rotated inputs times this are rotated inputs.
  static float scale(int block) { return block == 64 ? 1.0f : 1.41421356f; }

  /// Blocks of 32, 64 or 128 inputs.
  __device__ explicit FragmentRotation(int block) {
    const int g = threadIdx.x % 32 / 4, k = 2 * (threadIdx.x % 4);
    const int mixed = block == 128 ? 3 : block == 64 ? 1 : 0;
    rows_ = entry(quarter, g & k) | entry(quarter, g & (k + 1)) << 16;
    const uint32_t size = block == 128 ? quarter : half;
    const auto within = [&](int column) { return ((g ^ column) & ~mixed) != 0 ? 0 : entry(size, g & column & mixed); };
    columns_ = within(k) | within(k + 1) << 16;
  }

  __device__ uint4 rotate(const RawInputs& raw) const {
    const uint32_t signs = raw.signs << 4 * (threadIdx.x % 4);
    float sums[2][4] = {};
    const uint32_t first[4] = {rows_, rows_, rows_, rows_ ^ both_signs};
    device::HalfType::mma(sums[0], first, raw.x.x ^ (signs & both_signs), raw.x.y ^ (signs << 1 & both_signs));
    device::HalfType::mma(sums[1], first, raw.x.z ^ (signs << 2 & both_signs), raw.x.w ^ (signs << 3 & both_signs));
    float rotated[2][4] = {};
    const uint32_t second[4] = {columns_, columns_, columns_, columns_ ^ both_signs};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      device::HalfType::mma(rotated[i], second, pair(sums[0], i), pair(sums[1], i));
    }
    return make_uint4(pair(rotated[0], 0), pair(rotated[1], 0), pair(rotated[0], 1), pair(rotated[1], 1));
  }

 private:
  static constexpr uint32_t quarter = 0x3400, half = 0x3800, both_signs = 0x80008000u;

  __device__ static uint32_t entry(uint32_t size, int common_bits) { return size | __popc(common_bits) % 2 << 15; }
  __device__ static uint32_t pair(const float (&values)[4], int i) {
    return device::HalfType::pack(values[2 * i], values[2 * i + 1]);
  }

  uint32_t rows_, columns_;
};

}  // namespace w4q::kernels::rotated
