// The kbit GEMV with what lies between the products of a decode step (linear_fusion.h).
#include <type_traits>

#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_fused_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                       std::string_view shape) {
  with_types(scheme, DType::f16, [&]<int bits, class Type, class Scales>() {
    if constexpr (std::is_same_v<Type, device::HalfType>) {
      launch_rows<bits, Type, Scales, 1, true>(args, blocks, stream, shape);
    }
  });
}

}  // namespace w4q::kernels::kbit
