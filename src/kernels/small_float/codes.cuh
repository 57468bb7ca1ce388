// Codes of E4M3 in place of a table: a byte shifted into an f16 reads value / 256, exactly, small values included.
#pragma once

#include "kernels/kbit/pair_table.cuh"

namespace w4q::kernels::kbit {

/// Nothing is looked up; the tails of a GEMV need some room (kernels/frame/fix_up.cuh).
template <int kilobytes>
struct PairTable<8, kilobytes> {
  static constexpr int total_bytes = 32 * 1024;
  template <class Type>
  __device__ static void fill(char*, const float*, float) {}
};

/// Words 2·step and 2·step + 1 of a row tile have the registers of a step: those of half 0 in the lower half.
template <int kilobytes>
class LanePairs<8, kilobytes> {
 public:
  static constexpr float divisor = 256;

  __device__ explicit LanePairs(const char*) {}

  template <class Words>
  __device__ void step(const Words& words, int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t word = words(2 * step + upper);
      a[2 * upper] = halves(__byte_perm(word, 0, 0x1404));
      a[2 * upper + 1] = halves(__byte_perm(word, 0, 0x3424));
    }
  }

 private:
  /// Of two codes, each in the upper byte of a half.
  __device__ static uint32_t halves(uint32_t codes) {
    return device::and_or(codes, 0x80008000u, codes >> 1 & 0x3F803F80u);
  }
};

}  // namespace w4q::kernels::kbit
