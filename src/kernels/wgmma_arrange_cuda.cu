#include "kernels/wgmma_arrange.h"

#include <algorithm>

#include "device/fragment.cuh"
#include "kernels/kbit_linear_tile.cuh"
#include "kernels/overlap_launch.cuh"

namespace w4q::kernels::wgmma {
namespace {

constexpr int threads = 128;

struct Task {
  const uint16_t* x;
  int64_t ldx;
  int m, k;
  const int32_t* order;
  char* arranged;
  int rows;
  int k_tiles;
  int blocks;  ///< of 32 inputs of one row, in all tiles
  bool aligned;
};

/// Eight inputs from `column` on of row `row`, zeros beyond the activations.
__device__ uint4 load_eight(const Task& task, int row, int column) {
  if (row >= task.m) return make_uint4(0, 0, 0, 0);
  const uint16_t* const from = task.x + row * task.ldx;
  if (task.order != nullptr) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = column + 2 * j;
      const uint32_t low = c < task.k ? from[task.order[c]] : 0;
      const uint32_t high = c + 1 < task.k ? from[task.order[c + 1]] : 0;
      words[j] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (task.aligned && column + 8 <= task.k) return *reinterpret_cast<const uint4*>(from + column);
  return kbit::load_ragged(from + column, task.k - column);
}

__device__ void transpose(uint4 (&v)[4]) {
  const uint4 a = v[0], b = v[1], c = v[2], d = v[3];
  v[0] = make_uint4(a.x, b.x, c.x, d.x);
  v[1] = make_uint4(a.y, b.y, c.y, d.y);
  v[2] = make_uint4(a.z, b.z, c.z, d.z);
  v[3] = make_uint4(a.w, b.w, c.w, d.w);
}

/// A thread takes 32 inputs of one row: half a row of a tile.
template <InputOrder input_order>
__global__ void __launch_bounds__(threads) arrange_kernel(const Task task) {
  device::allow_next_launch();
  const int index = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  const int half = index % 2;
  const int k_tile = index / 2 % task.k_tiles;
  const int row = index / 2 / task.k_tiles;
  device::wait_for_previous_launch();
  if (index >= task.blocks) return;
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = load_eight(task, row, k_tile * 64 + half * 32 + 8 * i);
  if constexpr (input_order == InputOrder::kbit_fragment) transpose(v);
  const int64_t tile = static_cast<int64_t>(row / task.rows) * task.k_tiles + k_tile;
  char* const to = task.arranged + (tile * task.rows + row % task.rows) * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(to + ((4 * half + i) ^ (row % 8)) * 16) = v[i];
}

}  // namespace

size_t arranged_bytes(int64_t m, int64_t k, int rows) {
  return static_cast<size_t>((m + rows - 1) / rows * rows * ((k + 63) / 64) * 128);
}

void arrange(const Activations& x, InputOrder order, int rows, void* arranged, bool overlap, cudaStream_t stream) {
  Task task{};
  task.x = static_cast<const uint16_t*>(x.x);
  task.ldx = x.ldx;
  task.m = static_cast<int>(x.m);
  task.k = static_cast<int>(x.k);
  task.order = x.order;
  task.arranged = static_cast<char*>(arranged);
  task.rows = rows;
  task.k_tiles = static_cast<int>((x.k + 63) / 64);
  task.blocks = static_cast<int>(arranged_bytes(x.m, x.k, rows) / 64);
  task.aligned = reinterpret_cast<uintptr_t>(x.x) % 16 == 0 && x.ldx % 8 == 0;
  const dim3 grid(static_cast<unsigned>((task.blocks + threads - 1) / threads));
  const LaunchShape shape{grid, threads, 0, overlap};
  if (order == InputOrder::plain) {
    launch<arrange_kernel<InputOrder::plain>>(shape, stream, "arranging activations", task);
  } else {
    launch<arrange_kernel<InputOrder::kbit_fragment>>(shape, stream, "arranging activations", task);
  }
}

}  // namespace w4q::kernels::wgmma
