// kbit linear layer for 1 to 16 activation rows: memory-bound, so everything serves an unbroken stream of weights
// (gemv_block.cuh).
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  launch_any_rows<device::HalfType>(args, scheme, blocks, stream, shape);
}

}  // namespace w4q::kernels::kbit
