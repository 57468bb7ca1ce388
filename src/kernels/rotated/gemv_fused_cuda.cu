// The GEMV of rotated weights with what lies between the products of a decode step (linear_fusion.h).
#include "kernels/rotated/gemv_kernel.cuh"

namespace w4q::kernels::rotated {

void launch_fused_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks,
                       const device::Stream& stream, std::string_view shape) {
  with_widths(first_bits, second_bits, [&]<class Bits>() { launch_rows<Bits, 1, true>(args, blocks, stream, shape); });
}

}  // namespace w4q::kernels::rotated
