#include "kernels/integer_launch.cuh"
#include "kernels/wgmma_decode_marlin.cuh"
#include "kernels/wgmma_launch.cuh"

namespace w4q::kernels::wgmma {

void launch_marlin(const integer::MarlinLaunch& launch, DType activation, void* arranged, cudaStream_t stream,
                   std::string_view shape) {
  Layer layer = layer_of(launch);
  layer.input_order = launch.order;
  const auto run = [&]<class Type>() {
    typename MarlinWeights<Type>::Source source{};
    source.codes = reinterpret_cast<const char*>(launch.codes);
    source.scales = static_cast<const char*>(launch.scales);
    source.step_bytes = launch.input_tile_loads * 16;
    source.group_bytes = launch.padded_rows * 2;
    source.row_groups = launch.row_groups;
    source.steps = launch.input_tiles;
    if (launch.group_shift != integer::one_group) {
      const int64_t inputs = int64_t{32} << launch.group_shift;
      source.groups = static_cast<int>((launch.k + inputs - 1) / inputs);
      source.group_shift = launch.group_shift;
    }
    source.scale_factor = launch.weight_factor;
    source.bf16_scales = launch.bf16_scales;
    wgmma::launch<MarlinWeights<Type>>(source, InputOrder::plain, layer, arranged, stream, shape);
  };
  if (activation == DType::f16) return run.template operator()<device::HalfType>();
  run.template operator()<device::Bf16Type>();
}

}  // namespace w4q::kernels::wgmma
