// Small floats for 17 to 64 activation rows (gemm_block.cuh): weights meet their scales in registers.
#include "kernels/kbit/gemm_kernel.cuh"
#include "kernels/small_float/launch.cuh"

namespace w4q::kernels::small_float {

void launch_gemm(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    frame::launch_gemm_kernel<kbit::KbitWeights<bits, device::HalfType, Scales>>(args, blocks, stream, "float_gemm",
                                                                                 shape);
  });
}

}  // namespace w4q::kernels::small_float
