// The kbit GEMV for activations of bf16.
#include "kernels/kbit/gemv_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_bf16_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                      std::string_view shape) {
  launch_any_rows<device::Bf16Type>(args, scheme, blocks, stream, shape);
}

}  // namespace w4q::kernels::kbit
