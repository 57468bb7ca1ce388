// Linear layer of rotated weights for 1 to 16 activation rows: memory-bound, in the frame of all GEMVs
// (gemv_block.cuh). Two passes are one weight whose rows are twice as long. One row is rotated on the spot, by every
// warp what it is about to multiply (input.cuh), several by all blocks together (share.cuh).
#include "kernels/rotated/gemv_kernel.cuh"

namespace w4q::kernels::rotated {

void launch_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_widths(first_bits, second_bits, [&]<class Bits>() {
    if (args.m == 1) return launch_rows<Bits, 1>(args, blocks, stream, shape);
    if (args.m <= 4) return launch_rows<Bits, 4>(args, blocks, stream, shape);
    if (args.m <= 8) return launch_rows<Bits, 8>(args, blocks, stream, shape);
    launch_rows<Bits, 16>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::rotated
