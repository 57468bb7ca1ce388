// The GEMV on Marlin's words with what lies between the products of a decode step (linear_fusion.h).
#include <type_traits>

#include "kernels/integer/gemv_kernel.cuh"

namespace w4q::kernels::integer {

void launch_fused_marlin_gemv(const MarlinLaunch& args, int bits, int blocks, const device::Stream& stream,
                              std::string_view shape) {
  with_types(args, bits, DType::f16, [&]<int width, class Type, bool with_zeros>() {
    if constexpr (std::is_same_v<Type, device::HalfType>) {
      launch_rows<width, Type, with_zeros, 1, false, true>(args, blocks, stream, shape);
    }
  });
}

}  // namespace w4q::kernels::integer
