#include "kernels/kbit/launch.cuh"
#include "kernels/wgmma/decode_kbit.cuh"
#include "kernels/wgmma/fragment_codes.h"
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

namespace {

template <class Weights>
KbitSource source_of(const frame::Launch& launch, const formats::Scheme& scheme) {
  constexpr int groups = Weights::n_tiles;
  KbitSource source{};
  source.e4m4 = scheme.scale == formats::ScaleType::e4m4;
  source.codebook = launch.codebook;
  source.table_factor = launch.table_factor;
  source.codes = map_fragment_codes<Weights>(launch.codes, launch.k_tiles, launch.n_tiles);
  const int scale_bytes = Weights::scale_bytes(source.e4m4);
  source.scales = map_boxes(launch.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                            {{scale_bytes / 4, 0, scale_bytes / 4},
                             {launch.k_tiles, scale_bytes, 1},
                             {launch.n_tiles, int64_t{launch.k_tiles} * scale_bytes, groups}});
  return source;
}

}  // namespace

void launch_kbit(const frame::Launch& launch, const formats::Scheme& scheme, DType activation, void* arranged,
                 const device::Stream& stream, std::string_view shape) {
  const Layer layer = layer_of(launch);
  kbit::with_bits(scheme.bits, activation, [&]<int bits, class Type>() {
    using Weights = KbitWeights<bits, Type>;
    const KbitSource source = source_of<Weights>(launch, scheme);
    with_rows<32>(layer, [&]<int rows>(const Layer& part) {
      launch_rows<Weights, rows>(source, InputOrder::kbit_fragment, part, arranged, stream, shape);
    });
  });
}

}  // namespace w4q::kernels::wgmma
