// Error feedback on both sides on the GPU (feedback_rows.h): rows one after the other, each moved by what the errors of
// those before it are worth, and in each the blocks one after the other. Row r is in block b while row r + 1 is in block
// b − 1: a step has one cell in each of up to as many rows as there are blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/text.h"
#include "device/check.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"

namespace w4q::quantize::cuda {

inline constexpr int cell_warps = 8;
inline constexpr int cell_threads = 32 * cell_warps;
/// Rows between which cells look for errors; what those before are worth comes from one product.
inline constexpr int64_t wave_rows = 512;

/// The rows of a task, [rows, k] by positions of both factors.
struct Wave {
  int64_t k, begin, rows;
  int blocks;
  const int64_t* starts;   ///< [blocks + 1]
  const int32_t* columns;  ///< of the positions along k
  const int32_t* order;    ///< the row of the weight at each position along n
  const float* pivots;     ///< of the inputs
  const float* along;      ///< [k, k], their coupling
  const float* across;     ///< [n, n], that of the outputs
  int64_t n;
  float *weights, *shifts, *errors;  ///< shifts hold what rows before `begin` are worth
  float* residuals;                  ///< [n, k], W − Ŵ
};

/// A block of a row, in shared memory.
template <int widest>
struct Cell {
  float target[widest], weight[widest], shift[widest], value[widest];
};

/// shift += Σ over rows of the task before this one.
template <int widest>
__device__ void shift_cell(const Wave& wave, int64_t row, int64_t from, int cols, float (&sums)[cell_warps][32],
                           Cell<widest>& cell) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* const coupling = wave.across + (wave.begin + row) * wave.n + wave.begin;
  const float* const residuals = wave.residuals + wave.begin * wave.k + from;
  for (int first = 0; first < cols; first += 32) {
    const int c = first + lane;
    float sum = 0;
    for (int64_t earlier = warp; c < cols && earlier < row; earlier += cell_warps) {
      sum += coupling[earlier] * residuals[earlier * wave.k + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c < cols) {
      for (int other = 1; other < cell_warps; ++other) sum += sums[other][lane];
      const int64_t at = row * wave.k + from + c;
      cell.shift[c] = sum + wave.shifts[at];
      cell.weight[c] = wave.weights[at] + cell.shift[c];
    }
    __syncthreads();
  }
}

/// target = weight + Σ over blocks before this one.
template <int widest>
__device__ void aim_cell(const Wave& wave, int64_t row, int64_t from, int cols, Cell<widest>& cell) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* const errors = wave.errors + row * wave.k;
  for (int c = warp; c < cols; c += cell_warps) {
    const float* const coupling = wave.along + (from + c) * wave.k;
    float sum = 0;
    for (int64_t p = lane; p < from; p += 32) sum += coupling[p] * errors[p];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) cell.target[c] = cell.weight[c] + sum;
  }
  __syncthreads();
}

/// Family: Shared, and round(shared, wave, cell, row of the weight, from, cols), by all threads, which fills cell.value.
template <int widest, class Family>
__global__ void __launch_bounds__(cell_threads) cell_kernel(Wave wave, Family family, int64_t step) {
  __shared__ Cell<widest> cell;
  __shared__ float sums[cell_warps][32];
  __shared__ typename Family::Shared shared;
  const int64_t row = max(int64_t{0}, step - wave.blocks + 1) + blockIdx.x, block = step - row;
  const int64_t from = wave.starts[block];
  const int cols = static_cast<int>(wave.starts[block + 1] - from);
  shift_cell(wave, row, from, cols, sums, cell);
  aim_cell(wave, row, from, cols, cell);
  family.round(shared, wave, cell, wave.order[wave.begin + row], block, from, cols);
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < cols; c += cell_threads) {
    const int64_t at = row * wave.k + from + c;
    const float error = cell.weight[c] - cell.value[c];
    wave.errors[at] = error;
    wave.residuals[wave.begin * wave.k + at] = error - cell.shift[c];
  }
}

/// out[r][p] = weight[rows[r]][columns[p]].
static __global__ void __launch_bounds__(256)
    order_both_kernel(const float* weight, int64_t rows, int64_t k, const int32_t* order, const int32_t* columns,
                      float* out) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < rows * k) out[at] = weight[int64_t{order[at / k]} * k + columns[at % k]];
}

/// Goes with all rows of `weight` [n, k] through all blocks of `along`, which has at most `widest` columns in each.
template <int widest, class Family>
void feed_back_both(CudaWork& work, const float* weight, const ErrorFactorCuda& along, const ErrorFactorCuda& across,
                    const Family& family) {
  const int64_t n = across.width(), k = along.width(), most = std::min(n, wave_rows);
  device::DeviceBuffer floats(work.context, static_cast<size_t>((3 * most + n) * k) * sizeof(float));
  const auto starts = device::DeviceBuffer::copy_of(bytes_of(along.order().starts), work.stream);
  work.stream.synchronize();
  auto* const first = floats.as<float>();
  Wave wave{.k = k,
            .begin = 0,
            .rows = 0,
            .blocks = static_cast<int>(along.order().starts.size()) - 1,
            .starts = starts.template as<int64_t>(),
            .columns = along.columns(),
            .order = across.columns(),
            .pivots = along.pivots(),
            .along = along.coupling(),
            .across = across.coupling(),
            .n = n,
            .weights = first,
            .shifts = first + most * k,
            .errors = first + 2 * most * k,
            .residuals = first + 3 * most * k};
  for (; wave.begin < n; wave.begin += most) {
    wave.rows = std::min(most, n - wave.begin);
    order_both_kernel<<<static_cast<unsigned>((wave.rows * k + 255) / 256), 256, 0, work.stream.get()>>>(
        weight, wave.rows, k, wave.order + wave.begin, wave.columns, wave.weights);
    if (wave.begin == 0) {
      device::fill(wave.shifts, 0, static_cast<size_t>(wave.rows * k) * sizeof(float), work.stream, "clearing shifts");
    } else {
      const device::CublasFloatProduct product{.m = wave.rows,
                                               .n = k,
                                               .k = wave.begin,
                                               .a = wave.across + wave.begin * n,
                                               .lda = n,
                                               .b = wave.residuals,
                                               .ldb = k,
                                               .c = wave.shifts,
                                               .ldc = k,
                                               .workspace = work.cublas.data()};
      device::cublas_multiply(product, work.stream);
    }
    for (int64_t step = 0; step < wave.rows + wave.blocks - 1; ++step) {
      const int64_t low = std::max<int64_t>(0, step - wave.blocks + 1), high = std::min(wave.rows - 1, step);
      cell_kernel<widest>
          <<<static_cast<unsigned>(high - low + 1), cell_threads, 0, work.stream.get()>>>(wave, family, step);
    }
    device::check_launch("error feedback on both sides", concat(n, " × ", k));
  }
  work.stream.synchronize();
}

}  // namespace w4q::quantize::cuda
