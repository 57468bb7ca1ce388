// The GEMV of small floats for one activation row, with what lies between the products of a decode step
// (linear_fusion.h).
#include "kernels/kbit/gemv_kernel.cuh"
#include "kernels/small_float/launch.cuh"

namespace w4q::kernels::small_float {

void launch_fused_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                       std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    kbit::launch_rows<bits, device::HalfType, Scales, 1, true>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::small_float
