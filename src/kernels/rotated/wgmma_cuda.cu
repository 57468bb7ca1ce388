#include "core/with_bits.h"
#include "kernels/rotated/launch.cuh"
#include "kernels/rotated/wgmma.h"
#include "kernels/rotated/wgmma_decode.cuh"
#include "kernels/wgmma/fragment_codes.h"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::rotated {
namespace {

template <class Weights>
RotatedPassSource source_of(const RotatedLaunch& launch, const Source& pass) {
  constexpr int groups = Weights::n_tiles;
  constexpr int norm_bytes = Weights::norm_bytes;
  RotatedPassSource source{};
  source.levels = pass.levels;
  source.group_shift = pass.group_shift;
  source.codes = wgmma::map_fragment_codes<Weights>(pass.codes, launch.pass_tiles, launch.n_tiles);
  source.norms = wgmma::map_boxes(pass.norms, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                                  {{norm_bytes / 4, 0, norm_bytes / 4},
                                   {pass.groups, norm_bytes, pass.group_shift == 5 ? 2 : 1},
                                   {launch.n_tiles, int64_t{pass.groups} * norm_bytes, groups}});
  return source;
}

template <int bits>
void launch_bits(const RotatedLaunch& launch, void* arranged, const device::Stream& stream, std::string_view shape) {
  using Weights = RotatedWeights<bits>;
  RotatedSource source{};
  source.count = launch.passes;
  source.pass_tiles = launch.pass_tiles;
  source.table_factor = launch.table_factor;
  for (int p = 0; p < launch.passes; ++p) source.passes[p] = source_of<Weights>(launch, launch.sources[p]);
  source.inputs = launch.inputs;
  source.arranged = static_cast<char*>(arranged);
  wgmma::with_rows<16>(wgmma::layer_of(launch), [&]<int rows>(const wgmma::Layer& part) {
    wgmma::launch_rows<Weights, rows>(source, part, arranged, stream, shape);
  });
}

}  // namespace

void launch_wgmma(const RotatedLaunch& launch, int bits, void* arranged, const device::Stream& stream,
                  std::string_view shape) {
  with_table_bits(bits, [&]<int width>() { launch_bits<width>(launch, arranged, stream, shape); });
}

}  // namespace w4q::kernels::rotated
