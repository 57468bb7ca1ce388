// kbit linear layer for 1 to 16 activation rows: memory-bound, so everything serves an unbroken stream of weights
// (gemv_block.cuh).
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {
namespace {

template <int bits, class Type, class Scales>
void launch_bits(const Launch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<bits, Type, Scales, 1>(args, blocks, stream, shape);
  if (args.m <= 4) return launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
  if (args.m <= 8) return launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
  launch_rows<bits, Type, Scales, 16>(args, blocks, stream, shape);
}

}  // namespace

void launch_gemv(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks,
                 const device::Stream& stream, std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    launch_bits<bits, Type, Scales>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
