// Integer linear layer on Marlin's words for 1 to 16 activation rows: memory-bound, so everything serves an unbroken
// stream of weights (gemv_block.cuh). A tile is four of Marlin's steps of 16 inputs × 64 outputs, 512 bytes each at 4
// bits, one 128-bit load for a lane.
#include "kernels/integer/gemv_kernel.cuh"

namespace w4q::kernels::integer {
namespace {

template <int bits, class Type, bool with_zeros>
void launch_bits(const MarlinLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<bits, Type, with_zeros, 1>(args, blocks, stream, shape);
  if (args.m <= 8) return launch_rows<bits, Type, with_zeros, 8>(args, blocks, stream, shape);
  if (has_large_blocks(stream.context().properties()))
    return launch_rows<bits, Type, with_zeros, 16, true>(args, blocks, stream, shape);
  launch_rows<bits, Type, with_zeros, 16>(args, blocks, stream, shape);
}

}  // namespace

void launch_marlin_gemv(const MarlinLaunch& args, int bits, DType activation, int blocks, const device::Stream& stream,
                        std::string_view shape) {
  with_types(args, bits, activation, [&]<int width, class Type, bool with_zeros>() {
    launch_bits<width, Type, with_zeros>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::integer
