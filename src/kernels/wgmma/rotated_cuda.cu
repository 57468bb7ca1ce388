#include "kernels/rotated/launch.cuh"
#include "kernels/wgmma/decode_rotated.cuh"
#include "kernels/wgmma/fragment_codes.h"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::wgmma {
namespace {

template <class Weights>
RotatedPassSource source_of(const rotated::RotatedLaunch& launch, const rotated::Source& pass) {
  constexpr int groups = Weights::row_groups;
  constexpr int norm_bytes = Weights::norm_bytes;
  RotatedPassSource source{};
  source.levels = pass.levels;
  source.group_shift = pass.group_shift;
  source.codes = map_fragment_codes<Weights>(pass.codes, launch.pass_tiles, launch.row_groups);
  source.norms = map_boxes(pass.norms, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                           {{norm_bytes / 4, 0, norm_bytes / 4},
                            {pass.groups, norm_bytes, pass.group_shift == 5 ? 2 : 1},
                            {launch.row_groups, int64_t{pass.groups} * norm_bytes, groups}});
  return source;
}

template <int bits>
void launch_bits(const rotated::RotatedLaunch& launch, void* arranged, cudaStream_t stream, std::string_view shape) {
  using Weights = RotatedWeights<bits>;
  RotatedSource source{};
  source.count = launch.passes;
  source.pass_tiles = launch.pass_tiles;
  source.table_factor = launch.table_factor;
  for (int p = 0; p < launch.passes; ++p) source.passes[p] = source_of<Weights>(launch, launch.sources[p]);
  source.inputs = launch.inputs;
  source.arranged = static_cast<char*>(arranged);
  with_rows<16>(layer_of(launch), [&]<int rows>(const Layer& part) {
    launch_rows<Weights, rows>(source, InputOrder::kbit_fragment, part, arranged, stream, shape);
  });
}

}  // namespace

void launch_rotated(const rotated::RotatedLaunch& launch, int bits, void* arranged, cudaStream_t stream,
                    std::string_view shape) {
  with_table_bits(bits, [&]<int width>() { launch_bits<width>(launch, arranged, stream, shape); });
}

}  // namespace w4q::kernels::wgmma
