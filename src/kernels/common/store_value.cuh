// How products store values.
#pragma once

#include <cstdint>

namespace w4q::kernels {

/// *to += value, without waiting for what is there.
__device__ __forceinline__ void add_to(float* to, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

/// y[at] = value + residual[at]; y and the residual, which may be y or null, are f32 or of the 16-bit type.
template <class Type>
__device__ __forceinline__ void store_value(void* y, const void* residual, bool fp32, int64_t at, float value) {
  using Scalar = typename Type::Scalar;
  if (fp32) {
    float* const to = static_cast<float*>(y) + at;
    if (residual == y) return add_to(to, value);
    *to = residual == nullptr ? value : value + static_cast<const float*>(residual)[at];
  } else {
    if (residual != nullptr) value += Type::widen(static_cast<const Scalar*>(residual)[at]);
    static_cast<Scalar*>(y)[at] = Type::narrow(value);
  }
}

}  // namespace w4q::kernels
