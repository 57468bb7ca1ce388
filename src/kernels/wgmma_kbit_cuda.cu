#include "kernels/kbit_launch.cuh"
#include "kernels/wgmma_decode_kbit.cuh"
#include "kernels/wgmma_launch.cuh"

namespace w4q::kernels::wgmma {

bool built() noexcept { return true; }

size_t workspace_bytes(int64_t m, int64_t k) {
  size_t most = 0;
  for (const int64_t at_most : {int64_t{32}, int64_t{64}, most_rows_at_once}) {
    const int64_t rows = std::min(m, at_most);
    most = std::max(most, arranged_bytes(rows, k, tile_rows(rows)));
  }
  return most;
}

void launch_kbit(const kbit::Launch& launch, const formats::Scheme& scheme, DType activation, void* arranged,
                 cudaStream_t stream, std::string_view shape) {
  const Layer layer = layer_of(launch);
  const auto run = [&]<int bits, class Type>() {
    using Weights = KbitWeights<bits, Type>;
    const typename Weights::Source source{launch.codes,
                                          launch.scales,
                                          launch.codebook,
                                          launch.table_exponent,
                                          launch.row_groups,
                                          launch.col_groups,
                                          scheme.scale == formats::ScaleType::e4m4};
    wgmma::launch<Weights>(source, InputOrder::kbit_fragment, layer, arranged, stream, shape);
  };
  const auto with_type = [&]<int bits>() {
    if (activation == DType::f16) return run.template operator()<bits, device::HalfType>();
    return run.template operator()<bits, device::Bf16Type>();
  };
  switch (scheme.bits) {
    case 2:
      return with_type.template operator()<2>();
    case 3:
      return with_type.template operator()<3>();
    case 4:
      return with_type.template operator()<4>();
    default:
      return with_type.template operator()<5>();
  }
}

}  // namespace w4q::kernels::wgmma
