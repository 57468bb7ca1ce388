// The kbit GEMV of one row over some of many weights: the experts that a token was sent to, in one launch.
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_routed_gemv(const frame::RoutedLaunch& args, const formats::Scheme& scheme, int blocks,
                        const device::Stream& stream, std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    launch_rows<bits, device::HalfType, Scales, 1, true, frame::Router>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
