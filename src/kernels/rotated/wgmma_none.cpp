// For builds without sm_90: no GPU has the kernel.
#include "core/error.h"
#include "kernels/rotated/wgmma.h"

namespace w4q::kernels::rotated {

void launch_wgmma(const RotatedLaunch&, int, void*, const device::Stream&, std::string_view) {
  throw Error(ErrorCode::unsupported, "this build has no kernels for sm_90a");
}

}  // namespace w4q::kernels::rotated
