#include "kernels/wgmma/arrange.h"

#include <algorithm>

#include "device/alignment.h"
#include "device/fragment.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/frame/tile.cuh"

namespace w4q::kernels::wgmma {
namespace {

constexpr int threads = 128;

struct ArrangeTask {
  const uint16_t* x;
  int64_t ldx;
  int m, k;
  const int32_t* order;
  char* arranged;
  int rows;
  int k_tiles;
  int warps;  ///< with work
  bool aligned;
};

/// Eight inputs from `column` on of row `row`, zeros beyond the activations.
__device__ uint4 load_eight(const ArrangeTask& task, int row, int column) {
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
  return frame::load_ragged(from + column, task.k - column);
}

/// A warp takes `warp_rows` rows of a tile, four at a time: lane 8·r + c the piece c of row r.
constexpr int warp_rows = 16;
constexpr int padded_row = 144;  ///< bytes: words of neighbouring rows stand in different banks

/// Piece `piece` of a row in kbit-fragment's order, by way of shared memory that only this warp uses.
__device__ uint4 reorder(const uint4& v, char* four_rows, int row, int from, int piece) {
  char* const mine = four_rows + row * padded_row;
  *reinterpret_cast<uint4*>(mine + from * 16) = v;
  __syncwarp();
  const char* const words = mine + piece / 4 * 64 + piece % 4 * 4;
  const auto word = [&](int t) { return *reinterpret_cast<const uint32_t*>(words + t * 16); };
  return make_uint4(word(0), word(1), word(2), word(3));
}

template <InputOrder input_order>
__global__ void __launch_bounds__(threads) arrange_kernel(const ArrangeTask task) {
  __shared__ uint4 buffer[threads / 32][warp_rows / 4][4 * padded_row / 16];
  device::trigger_dependent_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int index = static_cast<int>(blockIdx.x) * (threads / 32) + warp;
  const int k_tile = index % task.k_tiles;
  const int first_row = index / task.k_tiles * warp_rows;
  const int row_of_four = static_cast<int>(threadIdx.x) % 32 / 8;
  const int piece = static_cast<int>(threadIdx.x) % 8;
  device::wait_grid_dependency();
  if (index >= task.warps) return;
  uint4 v[warp_rows / 4];
#pragma unroll
  for (int i = 0; i < warp_rows / 4; ++i) {
    v[i] = load_eight(task, first_row + 4 * i + row_of_four, k_tile * 64 + piece * 8);
  }
#pragma unroll
  for (int i = 0; i < warp_rows / 4; ++i) {
    const int row = first_row + 4 * i + row_of_four;
    const int64_t tile = static_cast<int64_t>(row / task.rows) * task.k_tiles + k_tile;
    char* const to = task.arranged + (tile * task.rows + row % task.rows) * 128;
    if constexpr (input_order == InputOrder::kbit_fragment) {
      const int wanted = piece ^ row % 8;
      *reinterpret_cast<uint4*>(to + piece * 16) =
          reorder(v[i], reinterpret_cast<char*>(buffer[warp][i]), row_of_four, piece, wanted);
    } else {
      *reinterpret_cast<uint4*>(to + (piece ^ row % 8) * 16) = v[i];
    }
  }
}

}  // namespace

size_t arranged_bytes(int64_t m, int64_t k, int rows) {
  return static_cast<size_t>((m + rows - 1) / rows * rows * ((k + 63) / 64) * 128);
}

void arrange(const Activations& x, InputOrder order, int rows, void* arranged, bool overlap,
             const device::Stream& stream) {
  ArrangeTask task{};
  task.x = static_cast<const uint16_t*>(x.x);
  task.ldx = x.ldx;
  task.m = static_cast<int>(x.m);
  task.k = static_cast<int>(x.k);
  task.order = x.order;
  task.arranged = static_cast<char*>(arranged);
  task.rows = rows;
  task.k_tiles = static_cast<int>((x.k + 63) / 64);
  task.warps = static_cast<int>((x.m + rows - 1) / rows * rows / warp_rows * task.k_tiles);
  task.aligned = device::aligned(x.x, 16) && x.ldx % 8 == 0;
  const dim3 grid(static_cast<unsigned>((task.warps + threads / 32 - 1) / (threads / 32)));
  const LaunchShape shape{grid, threads, 0, overlap};
  if (order == InputOrder::plain) {
    launch<arrange_kernel<InputOrder::plain>>(shape, stream, "arranging activations", task);
  } else {
    launch<arrange_kernel<InputOrder::kbit_fragment>>(shape, stream, "arranging activations", task);
  }
}

}  // namespace w4q::kernels::wgmma
