// Error feedback on both sides on the GPU (feedback_rows.h): rows one after the other, each moved by what the errors of
// those above it are worth, and in each the blocks one after the other. A cell is a block of a row; it needs the cells
// above it and to its left. Tiles of cells on a diagonal are worked on together, and in each the cells on a diagonal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/text.h"
#include "device/check.h"
#include "device/fragment.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"

namespace w4q::quantize::cuda {

inline constexpr int cell_warps = 8;
inline constexpr int cell_threads = 32 * cell_warps;
/// A tile of cells: rows, and columns of blocks, between which cells look for errors. What lies before comes from products.
inline constexpr int64_t tile_rows = 128, tile_columns = 512;

/// A weight on its way, everything [n, k] by positions of both factors.
struct Wave {
  int64_t n, k;
  int blocks;
  int64_t tile_blocks;                  ///< of a tile
  const int64_t* starts;                ///< [blocks + 1]
  const int32_t* columns;               ///< of the positions along k
  const int32_t* order;                 ///< the row of the weight at each position along n
  const float* pivots;                  ///< of the inputs
  const float* along;                   ///< [k, k], their coupling
  const float* across;                  ///< [n, n], that of the outputs
  float *weights, *errors, *residuals;  ///< W, of rows as they are shifted, W − Ŵ
  float *shifts, *aims;                 ///< what rows above the tile, and columns before it, are worth
};

/// A block of a row, in shared memory.
template <int widest>
struct alignas(16) Cell {
  float target[widest], weight[widest], shift[widest], value[widest];
};

/// What the cells above and to the left of one are worth to it, in shared memory: by warps, and summed.
template <int widest>
struct Neighbours {
  float above[cell_warps][widest], left[widest];
};

/// above: Σ over rows of the tile before `row`, each warp its share. Loads of several rows are under way together.
template <int widest>
__device__ void sum_above(const Wave& wave, int64_t first, int64_t row, int64_t from, int cols,
                          Neighbours<widest>& sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* const coupling = wave.across + row * wave.n;
  constexpr int at_once = 8;
  for (int c = lane; c < cols; c += 32) {
    const float* const residuals = wave.residuals + from + c;
    float sum = 0;
    for (int64_t begin = first + warp; begin < row; begin += at_once * cell_warps) {
      float worth[at_once], residual[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int64_t above = begin + i * cell_warps;
        worth[i] = above < row ? coupling[above] : 0.0f;
        residual[i] = above < row ? residuals[above * wave.k] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) sum += worth[i] * residual[i];
    }
    sums.above[warp][c] = sum;
  }
}

/// left: Σ over columns of the tile before this block.
template <int widest>
__device__ void sum_left(const Wave& wave, int64_t first, int64_t row, int64_t from, int cols,
                         Neighbours<widest>& sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* const errors = wave.errors + row * wave.k;
  constexpr int at_once = 4, steps = 4;  // columns, and errors of a lane, whose loads are under way together
  for (int begin = warp; begin < cols; begin += at_once * cell_warps) {
    float found[at_once] = {};
    for (int64_t start = first + lane; start < from; start += 32 * steps) {
      float error[steps], worth[steps][at_once];
#pragma unroll
      for (int s = 0; s < steps; ++s) {
        const int64_t p = start + 32 * s;
        error[s] = p < from ? errors[p] : 0.0f;
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int c = begin + i * cell_warps;
          worth[s][i] = p < from && c < cols ? wave.along[(from + c) * wave.k + p] : 0.0f;
        }
      }
#pragma unroll
      for (int s = 0; s < steps; ++s) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) found[i] += worth[s][i] * error[s];
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int c = begin + i * cell_warps;
      float sum = found[i];
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      if (lane == 0 && c < cols) sums.left[c] = sum;
    }
  }
}

/// What a thread's column of a cell has before its neighbours in the tile: the weight, and what products gave.
struct Start {
  float weight = 0, shift = 0, aim = 0;

  __device__ Start(const Wave& wave, int64_t row, int64_t from, int cols) {
    const auto c = static_cast<int>(threadIdx.x);
    if (c >= cols) return;
    const int64_t at = row * wave.k + from + c;
    weight = wave.weights[at], shift = wave.shifts[at], aim = wave.aims[at];
  }
};

/// shift, weight and target of a cell from what its neighbours are worth; by all threads.
template <int widest>
__device__ void aim_cell(const Start& start, int cols, const Neighbours<widest>& sums, Cell<widest>& cell) {
  static_assert(widest <= cell_threads);
  const auto c = static_cast<int>(threadIdx.x);
  if (c >= cols) return;
  float sum = sums.above[0][c];
#pragma unroll
  for (int warp = 1; warp < cell_warps; ++warp) sum += sums.above[warp][c];
  cell.shift[c] = sum + start.shift;
  cell.weight[c] = start.weight + cell.shift[c];
  cell.target[c] = cell.weight[c] + (sums.left[c] + start.aim);
}

/// Step `step` of the tiles on a diagonal, which are blockIdx.y: in each a cell of every row that is in a block then,
/// which are neighbours. Family, by all threads: prepare(shared, wave, from, cols), what does not ask for neighbours;
/// round(shared, wave, cell, row of the weight, block, from, cols), which fills cell.value.
template <int widest, class Family>
__global__ void __launch_bounds__(cell_threads) cell_kernel(Wave wave, Family family, int64_t tile, int64_t step) {
  __shared__ Cell<widest> cell;
  __shared__ Neighbours<widest> sums;
  __shared__ typename Family::Shared shared;
  const int64_t across = tile - blockIdx.y, first_row = int64_t{blockIdx.y} * tile_rows;
  const int64_t first_block = across * wave.tile_blocks;
  const int64_t index = max(int64_t{0}, step - wave.tile_blocks + 1) + blockIdx.x;
  const int64_t row = first_row + index, block = first_block + step - index;
  const bool outside = across < 0 || first_block >= wave.blocks || index >= tile_rows || row >= wave.n ||
                       block < first_block ||
                       block >= min(first_block + wave.tile_blocks, static_cast<int64_t>(wave.blocks));
  device::trigger_dependent_launch();
  const int64_t from = outside ? 0 : wave.starts[block];
  const int cols = outside ? 0 : static_cast<int>(wave.starts[block + 1] - from);
  family.prepare(shared, wave, from, cols);
  device::wait_grid_dependency();  // all wait, so that the launch behind finds every step before it done
  if (outside) return;
  const Start start(wave, row, from, cols);
  sum_above(wave, first_row, row, from, cols, sums);
  sum_left(wave, wave.starts[first_block], row, from, cols, sums);
  __syncthreads();
  aim_cell(start, cols, sums, cell);
  __syncthreads();
  family.round(shared, wave, cell, wave.order[row], block, from, cols);
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < cols; c += cell_threads) {
    const int64_t at = row * wave.k + from + c;
    const float error = cell.weight[c] - cell.value[c];
    wave.errors[at] = error;
    wave.residuals[at] = error - cell.shift[c];
  }
}

/// out[r][p] = weight[order[r]][columns[p]].
static __global__ void __launch_bounds__(256)
    order_both_kernel(const float* weight, int64_t n, int64_t k, const int32_t* order, const int32_t* columns,
                      float* out) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < n * k) out[at] = weight[int64_t{order[at / k]} * k + columns[at % k]];
}

/// Goes with all rows of a weight through all blocks, a diagonal of tiles after the other.
template <int widest, class Family>
class FeedbackOnBothSides {
 public:
  FeedbackOnBothSides(CudaWork& work, const float* weight, const ErrorFactorCuda& along, const ErrorFactorCuda& across,
                      const Family& family)
      : work_(work),
        family_(family),
        starts_(along.order().starts),
        memory_(work.context, static_cast<size_t>(5 * across.width() * along.width()) * sizeof(float)),
        device_starts_(device::DeviceBuffer::copy_of(bytes_of(starts_), work.stream)) {
    const int64_t n = across.width(), k = along.width(), all = n * k;
    auto* const first = memory_.template as<float>();
    wave_ = {.n = n,
             .k = k,
             .blocks = static_cast<int>(starts_.size()) - 1,
             .tile_blocks = std::max<int64_t>(1, tile_columns / along.block()),
             .starts = device_starts_.template as<int64_t>(),
             .columns = along.columns(),
             .order = across.columns(),
             .pivots = along.pivots(),
             .along = along.coupling(),
             .across = across.coupling(),
             .weights = first,
             .errors = first + all,
             .residuals = first + 2 * all,
             .shifts = first + 3 * all,
             .aims = first + 4 * all};
    device::fill(wave_.shifts, 0, static_cast<size_t>(2 * all) * sizeof(float), work.stream, "clearing shifts");
    order_both_kernel<<<static_cast<unsigned>((all + 255) / 256), 256, 0, work.stream.get()>>>(
        weight, n, k, wave_.order, wave_.columns, wave_.weights);
  }

  void run() {
    const int64_t down = (wave_.n + tile_rows - 1) / tile_rows;
    const int64_t across = (wave_.blocks + wave_.tile_blocks - 1) / wave_.tile_blocks;
    const int64_t rows = std::min(wave_.n, tile_rows);
    for (int64_t tile = 0; tile < down + across - 1; ++tile) {
      const int64_t last = std::min(tile, down - 1);
      for (int64_t i = std::max<int64_t>(0, tile - across + 1); i <= last; ++i) take_in(i, tile - i);
      const dim3 grid(static_cast<unsigned>(std::min(rows, wave_.tile_blocks)), static_cast<unsigned>(last + 1));
      const device::LaunchShape shape{.grid = grid, .threads = cell_threads, .overlap = true};
      for (int64_t step = 0; step < rows + wave_.tile_blocks - 1; ++step) {
        kernels::launch<cell_kernel<widest, Family>>(shape, work_.stream, "error feedback on both sides", wave_,
                                                     family_, tile, step);
      }
      device::check_launch("error feedback on both sides", concat(wave_.n, " × ", wave_.k));
    }
    work_.stream.synchronize();
  }

 private:
  /// What lies before tile (i, j): rows above it, and columns to its left.
  void take_in(int64_t i, int64_t j) {
    const int64_t k = wave_.k, row = i * tile_rows, rows = std::min(tile_rows, wave_.n - row);
    const int64_t from = starts_[static_cast<size_t>(j * wave_.tile_blocks)];
    const int64_t end = starts_[static_cast<size_t>(std::min<int64_t>((j + 1) * wave_.tile_blocks, wave_.blocks))];
    device::CublasFloatProduct product{.m = rows, .n = end - from, .workspace = work_.cublas.data()};
    product.ldb = product.ldc = k;
    if (row > 0) {
      product.k = row;
      product.a = wave_.across + row * wave_.n;
      product.lda = wave_.n;
      product.b = wave_.residuals + from;
      product.c = wave_.shifts + row * k + from;
      device::cublas_multiply(product, work_.stream);
    }
    if (from > 0) {
      product.k = from;
      product.a = wave_.errors + row * k;
      product.lda = k;
      product.b = wave_.along + from * k;
      product.b_transposed = true;
      product.c = wave_.aims + row * k + from;
      device::cublas_multiply(product, work_.stream);
    }
  }

  CudaWork& work_;
  const Family family_;
  const std::vector<int64_t>& starts_;
  device::DeviceBuffer memory_, device_starts_;
  Wave wave_{};
};

}  // namespace w4q::quantize::cuda
