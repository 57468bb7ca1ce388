#include "kernels/wgmma/kbit_launch.cuh"

namespace w4q::kernels::wgmma {

void launch_kbit_bf16(const frame::Launch& launch, const formats::Scheme& scheme, void* arranged,
                      const device::Stream& stream, std::string_view shape) {
  launch_kbit_of<device::Bf16Type>(launch, scheme, arranged, stream, shape);
}

}  // namespace w4q::kernels::wgmma
