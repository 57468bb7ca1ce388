// The kbit GEMV with what lies between the products of a decode step (linear_fusion.h).
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_fused_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                       std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    launch_rows<bits, device::HalfType, Scales, 1, true>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
