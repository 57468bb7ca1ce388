// Codes of E4M3 in place of a table. From sm_89 on one instruction makes two of them f16; elsewhere a byte shifted into an f16
// reads value / 256, exactly, small values included, and is multiplied by 256. NaN codes stay NaN here and read ±480 there.
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
  __device__ explicit LanePairs(const char*) {}

  template <class Words>
  __device__ void step(const Words& words, int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) values(words(2 * step + upper), a[2 * upper], a[2 * upper + 1]);
  }

 private:
  /// Of the two lower codes of a word and of the two upper ones.
  __device__ static void values(uint32_t word, uint32_t& lower, uint32_t& upper) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(lower), "=r"(upper)
        : "r"(word));
#else
    lower = device::HalfType::multiply(halves(__byte_perm(word, 0, 0x1404)), twice_256);
    upper = device::HalfType::multiply(halves(__byte_perm(word, 0, 0x3424)), twice_256);
#endif
  }
  /// Of two codes, each in the upper byte of a half: 256ths.
  __device__ static uint32_t halves(uint32_t codes) {
    return device::and_or(codes, 0x80008000u, codes >> 1 & 0x3F803F80u);
  }
  static constexpr uint32_t twice_256 = 0x5C005C00u;
};

}  // namespace w4q::kernels::kbit
