// kbit products of many weights in one launch: the experts of a mixture, with the rows that were sent to each.
#include "kernels/frame/grouped.cuh"
#include "kernels/kbit/gemm_kernel.cuh"

namespace w4q::kernels::kbit {

void launch_grouped_gemm(const frame::GroupedLaunch& args, const formats::Scheme& scheme, const device::Stream& stream,
                         std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    frame::launch_grouped_gemm<KbitWeights<bits, device::HalfType, Scales>>(args, stream, "kbit_grouped_gemm", shape);
  });
}

}  // namespace w4q::kernels::kbit
