// For builds without sm_90: no GPU has the kernel.
#include "core/error.h"
#include "kernels/trellis/wgmma.h"

namespace w4q::kernels::trellis {

void launch_wgmma(const TrellisLaunch&, const formats::Scheme&, void*, const device::Stream&, std::string_view) {
  throw Error(ErrorCode::unsupported, "this build has no kernels for sm_90a");
}

}  // namespace w4q::kernels::trellis
