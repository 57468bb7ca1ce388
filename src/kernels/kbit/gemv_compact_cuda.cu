// The kbit GEMV of one row for products of few tiles a warp, of one weight or of some of many.
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_compact_gemv(const frame::RoutedLaunch& args, const formats::Scheme& scheme, int blocks,
                         const device::Stream& stream, std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    launch_rows<bits, device::HalfType, Scales, 1, true, frame::Router, true>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
