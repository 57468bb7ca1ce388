// kbit linear layer for 17 to 64 activation rows (gemm_block.cuh).
#include "kernels/kbit/gemm_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_gemm(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks,
                 const device::Stream& stream, std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    frame::launch_gemm_kernel<KbitWeights<bits, Type, Scales>>(args, blocks, stream, "kbit_gemm", shape);
  });
}

}  // namespace w4q::kernels::kbit
