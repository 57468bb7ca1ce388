#include "kernels/integer/launch.cuh"
#include "kernels/wgmma/decode_marlin.cuh"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::wgmma {

namespace {

template <class Weights>
MarlinSource source_of(const integer::MarlinLaunch& launch, DType activation) {
  constexpr int code_box = Weights::n_tiles * Weights::step_bytes / 8;
  constexpr int scale_box = Weights::n_tiles * Weights::group_scale_bytes / 4;
  const int64_t step_bytes = launch.input_tile_loads * 16;
  MarlinSource source{};
  source.codes = map_boxes(launch.codes, CU_TENSOR_MAP_DATA_TYPE_UINT64,
                           {{step_bytes / 8, 0, code_box}, {launch.input_tiles, step_bytes, 4}});
  source.scale_factor = launch.weight_factor;
  source.bf16_scales = launch.bf16_scales;
  source.plain_scales = true;
  if (launch.group_shift == integer::one_group) return source;
  const int64_t inputs = int64_t{32} << launch.group_shift;
  source.groups = static_cast<int>((launch.k + inputs - 1) / inputs);
  source.group_shift = launch.group_shift;
  source.scales = map_boxes(launch.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                            {{launch.padded_rows / 2, 0, scale_box}, {source.groups, launch.padded_rows * 2, 1}});
  source.plain_scales = launch.weight_factor == 1 && launch.bf16_scales == (activation == DType::bf16);
  return source;
}

}  // namespace

void launch_marlin(const integer::MarlinLaunch& launch, DType activation, void* arranged, const device::Stream& stream,
                   std::string_view shape) {
  Layer layer = layer_of(launch);
  layer.input_order = launch.order;
  const auto run = [&]<class Type>() {
    with_rows<16, 256>(layer, [&]<int rows>(const Layer& part) {
      using Weights = MarlinWeights<Type, job_outputs(rows)>;
      const MarlinSource source = source_of<Weights>(launch, activation);
      launch_rows<Weights, rows>(source, part, arranged, stream, shape);
    });
  };
  if (activation == DType::f16) return run.template operator()<device::HalfType>();
  run.template operator()<device::Bf16Type>();
}

}  // namespace w4q::kernels::wgmma
