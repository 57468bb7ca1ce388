// The GEMV of small floats for 2 to 16 activation rows: that of kbit weights with other codes and scales.
#include "kernels/kbit/gemv_kernel.cuh"
#include "kernels/small_float/launch.cuh"

namespace w4q::kernels::small_float {

void launch_gemv(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    using Type = device::HalfType;
    if (args.m <= 4) return kbit::launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
    if (args.m <= 8) return kbit::launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
    kbit::launch_rows<bits, Type, Scales, 16>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::small_float
