// Exponentials of attention, in units of log2.
#pragma once

namespace w4q::kernels {

inline constexpr float log2_e = 1.4426950408889634f;

/// 2^x in one instruction; zero below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace w4q::kernels
