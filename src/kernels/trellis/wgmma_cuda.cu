#include "kernels/trellis/wgmma.h"

#include "core/with_bits.h"
#include "kernels/trellis/launch.cuh"
#include "kernels/trellis/wgmma_decode.cuh"
#include "kernels/wgmma/fragment_codes.h"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::trellis {

void launch_wgmma(const TrellisLaunch& launch, const formats::Scheme& scheme, void* arranged,
                  const device::Stream& stream, std::string_view shape) {
  with_bits<2, 3, 4>(scheme.bits, [&]<int bits>() {
    TrellisSource source{};
    source.tiles = launch.k_tiles;
    source.window = scheme.window;
    source.right = 32 - scheme.window;
    source.inputs = launch.inputs;
    source.arranged = static_cast<char*>(arranged);
    wgmma::with_rows<16, 256>(wgmma::layer_of(launch), [&]<int rows>(const wgmma::Layer& part) {
      using Weights = TrellisWeights<bits, wgmma::job_outputs(rows)>;
      source.codes = wgmma::map_fragment_codes<Weights>(launch.codes, launch.k_tiles, launch.n_tiles);
      wgmma::launch_rows<Weights, rows>(source, part, arranged, stream, shape);
    });
  });
}

}  // namespace w4q::kernels::trellis
