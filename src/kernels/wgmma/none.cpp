// For builds without sm_90: no GPU has the kernels.
#include "core/error.h"
#include "kernels/wgmma/linear.h"

namespace w4q::kernels::wgmma {

bool built() noexcept { return false; }

size_t workspace_bytes(int64_t, int64_t) { return 0; }

namespace {
[[noreturn]] void refuse() { throw Error(ErrorCode::unsupported, "this build has no kernels for sm_90a"); }
}  // namespace

void launch_kbit(const frame::Launch&, const formats::Scheme&, DType, void*, const device::Stream&, std::string_view) {
  refuse();
}
void launch_float(const frame::Launch&, const formats::Scheme&, void*, const device::Stream&, std::string_view) {
  refuse();
}
void launch_marlin(const integer::MarlinLaunch&, DType, void*, const device::Stream&, std::string_view) { refuse(); }

}  // namespace w4q::kernels::wgmma
