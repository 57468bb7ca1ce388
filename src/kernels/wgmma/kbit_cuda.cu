#include "kernels/kbit/launch.cuh"
#include "kernels/wgmma/decode_kbit.cuh"
#include "kernels/wgmma/launch.cuh"

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
  const Layer layer = layer_of(launch);
  kbit::with_bits(scheme.bits, activation, [&]<int bits, class Type>() {
    with_rows<32, 256>(layer, [&]<int rows>(const Layer& part) {
      using Weights = KbitWeights<bits, Type, job_outputs(rows)>;
      const auto source = kbit_source<Weights>(launch, {scheme.scale == formats::ScaleType::e4m4});
      launch_rows<Weights, rows>(source, part, arranged, stream, shape);
    });
  });
}

}  // namespace w4q::kernels::wgmma
