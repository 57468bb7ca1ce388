// Loops over constants.
#pragma once

namespace w4q::device {

/// Calls use.operator()<i>() for i = 0 … count − 1: what depends on i is known when this is compiled.
template <int count, int i = 0, class Use>
__device__ __forceinline__ void unroll(const Use& use) {
  if constexpr (i < count) {
    use.template operator()<i>();
    unroll<count, i + 1>(use);
  }
}

}  // namespace w4q::device
