// The host's side of a warpgroup kernel: plan and launch.
#pragma once

#include <array>
#include <string_view>

#include "core/dtype.h"
#include "device/check.h"
#include "kernels/kbit_launch.cuh"
#include "kernels/wgmma_arrange.h"
#include "kernels/wgmma_kernel.cuh"
#include "kernels/wgmma_linear.h"
#include "kernels/wgmma_map.h"

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
  float result_factor;
  bool overlap;
  const int32_t* input_order = nullptr;
  const void* output_scales = nullptr;
  bool bf16_output_scales = false;
};

inline Layer layer_of(const kbit::Launch& launch) {
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
  layer.result_factor = launch.result_factor;
  layer.overlap = launch.overlap;
  layer.output_scales = launch.output_scales;
  layer.bf16_output_scales = launch.bf16_output_scales;
  return layer;
}

/// How many clusters of `sharers` blocks run at the same time.
template <class Weights, int rows>
int fitting_clusters(int sharers) {
  static const auto counts = [] {
    constexpr auto kernel = wgmma_kernel<Weights, rows>;
    constexpr int bytes = Memory<Weights, rows>::bytes;
    device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                  "asking for shared memory");
    std::array<int, most_sharers + 1> fitting{};
    for (int size = 1; size <= most_sharers; ++size) {
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(size));
      config.blockDim = dim3(threads);
      config.dynamicSmemBytes = bytes;
      config.attrs = &cluster;
      config.numAttrs = 1;
      device::check(cudaOccupancyMaxActiveClusters(&fitting[static_cast<size_t>(size)], kernel, &config),
                    "asking how many clusters fit");
    }
    return fitting;
  }();
  return counts[static_cast<size_t>(sharers)];
}

/// What adding up shared sums takes, in jobs: some 4000 clocks against those of the tiles.
template <int rows>
double exchange_cost(int k_tiles) {
  constexpr double clocks = rows <= 32 ? 500 : rows == 64 ? 650 : 1100;
  return (1500 + 25.0 * rows) / (clocks * k_tiles);
}

/// Whether tiles may be copied from where the activations stand: in their order, rows on 16 bytes.
inline bool stand_in_order(const Layer& layer, InputOrder order) {
  return order == InputOrder::plain && layer.input_order == nullptr && reinterpret_cast<uintptr_t>(layer.x) % 16 == 0 &&
         layer.ldx % 8 == 0;
}

template <class Weights, int rows>
void launch_rows(const typename Weights::Source& weights, InputOrder order, const Layer& layer, void* arranged,
                 cudaStream_t stream, std::string_view shape) {
  using M = Memory<Weights, rows>;
  Task<Weights> task{};
  task.weights = weights;
  task.bias = layer.bias;
  task.residual = layer.residual;
  task.output_scales = layer.output_scales;
  task.bf16_output_scales = layer.bf16_output_scales;
  task.y = layer.y;
  task.ldy = layer.ldy;
  task.m = static_cast<int>(layer.m);
  task.n = static_cast<int>(layer.n);
  task.k_tiles = static_cast<int>((layer.k + 63) / 64);
  task.row_tiles = static_cast<int>((layer.m + rows - 1) / rows);
  task.result_factor = layer.result_factor;
  task.wide = reinterpret_cast<uintptr_t>(layer.y) % 16 == 0 && layer.ldy % 8 == 0 && layer.residual == nullptr;
  task.jobs = static_cast<int>((layer.n + job_outputs - 1) / job_outputs) * task.row_tiles;
  const auto fitting = [](int sharers) {
    constexpr int sum_pairs = rows / 4;
    const bool room = sharers * ((sum_pairs + sharers - 1) / sharers) * consumers * 8 <= M::scratch_bytes;
    return room ? fitting_clusters<Weights, rows>(sharers) : 0;
  };
  const Plan plan = best_plan(task.jobs, task.k_tiles, exchange_cost<rows>(task.k_tiles), fitting);
  task.whole_rounds = plan.whole_rounds;
  if (stand_in_order(layer, order)) {
    constexpr bool half = std::is_same_v<typename Weights::Type, device::HalfType>;
    task.x_map = map_boxes(layer.x, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           {{layer.k, 0, 64}, {layer.m, layer.ldx * 2, rows}}, true);
  } else {
    arrange({layer.x, layer.m, layer.k, layer.ldx, layer.input_order}, order, rows, arranged, layer.overlap, stream);
    task.x = static_cast<const char*>(arranged);
  }

  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(plan.sharers), 1, 1};
  // Weights are fetched while the launch before still runs, or while activations are still being arranged.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = layer.overlap || task.x != nullptr ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks()));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = M::bytes;
  config.stream = stream;
  config.attrs = plan.sharers > 1 ? attributes : attributes + 1;
  config.numAttrs = plan.sharers > 1 ? 2 : 1;
  device::check(cudaLaunchKernelEx(&config, wgmma_kernel<Weights, rows>, task, plan.sharers), "launching a kernel");
  device::check_launch("wgmma_linear", shape);
}

/// Calls launch.operator()<rows of a job>(part) for all rows, most_rows_at_once at a time.
template <class Launch>
void with_rows(Layer layer, const Launch& launch) {
  const auto* const x = static_cast<const std::byte*>(layer.x);
  auto* const y = static_cast<std::byte*>(layer.y);
  const auto* const residual = static_cast<const std::byte*>(layer.residual);
  const int64_t all = layer.m;
  for (int64_t first = 0; first < all; first += most_rows_at_once) {
    layer.m = std::min(most_rows_at_once, all - first);
    layer.x = x + 2 * first * layer.ldx;
    layer.y = y + 2 * first * layer.ldy;
    if (residual != nullptr) layer.residual = residual + 2 * first * layer.ldy;
    switch (tile_rows(layer.m)) {
      case 16:
        launch.template operator()<16>(layer);
        break;
      case 32:
        launch.template operator()<32>(layer);
        break;
      case 64:
        launch.template operator()<64>(layer);
        break;
      default:
        launch.template operator()<128>(layer);
    }
  }
}

}  // namespace w4q::kernels::wgmma
