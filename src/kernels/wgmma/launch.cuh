// The host's side of a warpgroup kernel: plan and launch.
#pragma once

#include <string_view>

#include "core/dtype.h"
#include "device/check.h"
#include "device/launch.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/frame/launch.cuh"
#include "kernels/linear/rows.h"
#include "kernels/wgmma/arrange.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/linear.h"
#include "kernels/wgmma/map.h"

namespace w4q::kernels::wgmma {

/// A layer without its weights.
struct Layer {
  int64_t m, n, k;
  const void* x;
  int64_t ldx;
  void* y;
  int64_t ldy;
  const float* bias;
  const void* residual;
  bool fp32;  ///< y and the residual
  float result_factor;
  bool overlap;
  const int32_t* input_order = nullptr;
  MailboxPair* exchange = nullptr;
  const void* output_scales = nullptr;
  bool bf16_output_scales = false;
  bool output_scales_in_order = false;
  const float* output_factors = nullptr;
  bool swiglu = false;
};

inline Layer layer_of(const frame::Launch& launch) {
  Layer layer{};
  layer.m = launch.m;
  layer.n = launch.n;
  layer.k = launch.k;
  layer.x = launch.x;
  layer.ldx = launch.ldx;
  layer.y = launch.y;
  layer.ldy = launch.ldy;
  layer.bias = launch.bias;
  layer.residual = launch.residual;
  layer.fp32 = launch.fp32;
  layer.result_factor = launch.result_factor;
  layer.overlap = launch.overlap;
  layer.exchange = launch.mailboxes;
  if (launch.fp32_output_scales) {
    layer.output_factors = static_cast<const float*>(launch.output_scales);
  } else {
    layer.output_scales = launch.output_scales;
    layer.bf16_output_scales = launch.bf16_output_scales;
    layer.output_scales_in_order = launch.output_scales_in_order;
  }
  layer.swiglu = launch.fusion.swiglu;
  return layer;
}

/// What adding up shared sums takes, in jobs: some 4000 clocks against those of the tiles.
template <int rows>
double exchange_cost(int k_tiles) {
  constexpr double clocks = rows <= 32 ? 500 : rows == 64 ? 650 : 1100;  // of a tile
  return (1500 + 25.0 * rows) / (clocks * k_tiles);
}

/// Whether tiles may be copied from where the activations stand: in their order, rows on 16 bytes.
inline bool stand_in_order(const Layer& layer, InputOrder order) {
  return order == InputOrder::plain && layer.input_order == nullptr && aligned(layer.x, 16) && layer.ldx % 8 == 0;
}

template <class Weights, int rows>
void launch_rows(const typename Weights::Source& weights, const Layer& layer, void* arranged,
                 const device::Stream& stream, std::string_view shape) {
  Task<Weights> task{};
  task.weights = weights;
  task.bias = layer.bias;
  task.residual = layer.residual;
  task.fp32 = layer.fp32;
  task.swiglu = layer.swiglu;
  task.output_scales = layer.output_scales;
  task.bf16_output_scales = layer.bf16_output_scales;
  task.output_scales_in_order = layer.output_scales_in_order;
  task.output_factors = layer.output_factors;
  task.y = layer.y;
  task.ldy = layer.ldy;
  task.m = static_cast<int>(layer.m);
  task.n = static_cast<int>(layer.n);
  task.k_tiles = static_cast<int>((layer.k + 63) / 64);
  if constexpr (Weights::makes_inputs) task.k_tiles *= weights.count;
  task.row_tiles = static_cast<int>((layer.m + rows - 1) / rows);
  task.exchange = layer.exchange;
  task.result_factor = layer.result_factor;
  const auto starts = reinterpret_cast<uintptr_t>(layer.y) | reinterpret_cast<uintptr_t>(layer.residual);
  task.wide = starts % 16 == 0 && layer.ldy % (layer.fp32 ? 4 : 8) == 0;
  task.jobs = static_cast<int>((layer.n + job_outputs(rows) - 1) / job_outputs(rows)) * task.row_tiles;
  // Blocks that run at the same time: one a multiprocessor.
  const int blocks = stream.context().properties().multiprocessors;
  const Plan plan =
      best_plan(task.jobs, task.k_tiles, exchange_cost<rows>(task.k_tiles), blocks, most_shared_rounds(rows));
  task.whole_rounds = plan.whole_rounds;
  if constexpr (!Weights::makes_inputs) {
    constexpr InputOrder order = Weights::input_order(Memory<Weights, rows>::tiles);
    if (stand_in_order(layer, order)) {
      constexpr bool half = std::is_same_v<typename Weights::Type, device::HalfType>;
      task.x_map = map_boxes(layer.x, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                             {{layer.k, 0, 64}, {layer.m, layer.ldx * 2, rows}}, true);
    } else {
      arrange({layer.x, layer.m, layer.k, layer.ldx, layer.input_order}, order, rows, arranged, layer.overlap, stream);
      task.x = static_cast<const char*>(arranged);
    }
  }

  // Weights are fetched while the launch before still runs, or while activations are still being arranged.
  const bool early = layer.overlap || task.x != nullptr;
  const LaunchShape shape_of_launch{dim3(static_cast<unsigned>(plan.blocks())), Crew<rows>::threads,
                                    Memory<Weights, rows>::bytes, early};
  launch<wgmma_kernel<Weights, rows>>(shape_of_launch, stream, "launching a kernel", task, plan.sharers);
  device::check_launch("wgmma_linear", shape);
}

/// Calls launch.operator()<rows of a job>(part) for all rows, most_rows_at_once at a time. Jobs have `least` to `most`
/// rows.
template <int least, int most = 128, class Launch>
void with_rows(const Layer& layer, const Launch& launch) {
  in_slices(layer, most_rows_at_once, [&](const Layer& part) {
    switch (tile_rows(part.m, most)) {
      case 16:
        return launch.template operator()<least>(part);
      case 32:
        return launch.template operator()<32>(part);
      case 64:
        return launch.template operator()<64>(part);
      case 256:
        if constexpr (most == 256) return launch.template operator()<256>(part);
        break;
      default:
        return launch.template operator()<128>(part);
    }
  });
}

}  // namespace w4q::kernels::wgmma
