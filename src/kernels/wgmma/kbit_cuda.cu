#include "kernels/wgmma/kbit_launch.cuh"

namespace w4q::kernels::wgmma {

bool built() noexcept { return true; }

size_t workspace_bytes(int64_t m, int64_t k) {
  size_t most = 0;
  for (const int64_t at_most : {int64_t{16}, int64_t{32}, int64_t{64}, most_rows_at_once}) {
    const int64_t rows = std::min(m, at_most);
    most = std::max(most, arranged_bytes(rows, k, tile_rows(rows)));
  }
  return most;
}

void launch_kbit(const frame::Launch& launch, const formats::Scheme& scheme, DType activation, void* arranged,
                 const device::Stream& stream, std::string_view shape) {
  if (activation == DType::bf16) return launch_kbit_bf16(launch, scheme, arranged, stream, shape);
  launch_kbit_of<device::HalfType>(launch, scheme, arranged, stream, shape);
}

}  // namespace w4q::kernels::wgmma
