// Activations for Marlin's words: a lane's B operand is the inputs 2t, 2t + 1 and 2t + 8, 2t + 9 of a step.
#pragma once

#include "device/async_copy.cuh"
#include "device/matrices.cuh"
#include "kernels/integer/tile.cuh"

namespace w4q::kernels::integer {

/// Eight inputs one at a time: with act order, for rows that are not aligned to 16 bytes and where k ends.
template <class Scalar>
__device__ inline uint4 gather(const MarlinLaunch& args, const Scalar* row, int64_t first) {
  const auto one = [&](int64_t column) -> uint32_t {
    if (column >= args.k) return 0;
    const int64_t from = args.order == nullptr ? column : __ldg(args.order + column);
    return __ldg(reinterpret_cast<const unsigned short*>(row) + from);
  };
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = one(first + 2 * i) | one(first + 2 * i + 1) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// A tile of activations in shared memory, [row][8 chunks of 8 inputs]: chunks of a row exchanged by the row's number,
/// so that eight rows of a chunk lie in eight different groups of banks. ldmatrix gives a lane what it needs.
struct MatrixOrder {
  __device__ static int place(int row, int chunk) { return (row * 8 + (chunk ^ (row & 7))) * 16; }

  /// Starts bringing the chunk of row `row` that begins with input `first` to `to`; zeros beyond k.
  template <class Scalar>
  __device__ static void fetch(const MarlinLaunch& args, const Scalar* row, int64_t first, char* to) {
    if (args.order == nullptr && args.aligned && first + 8 <= args.k) {
      device::copy_async(to, row + first);
    } else {
      *reinterpret_cast<uint4*>(to) = gather(args, row, first);
    }
  }
  /// This lane's B registers of one block for `groups` groups of eight rows, of which `rows` are there.
  template <int groups>
  __device__ static void read(const char* tile, int block, uint4 (&x)[groups], int rows = 8 * groups) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      x[i] = device::load_matrices(tile + place(min(8 * i + lane % 8, rows - 1), 4 * block + lane / 8));
    }
  }
};

/// What a lane brings of a tile of at most `rows` activation rows: chunk `lane mod 8` of every fourth row.
template <class Scalar, int rows>
struct StagedInputs {
  const Scalar* from;  ///< the lane's chunk of its first row
  int64_t row_stride;  ///< four rows further
  int last;            ///< the last input at which a chunk may begin that copies bring; −1: none
  int count;           ///< of rows

  __device__ explicit StagedInputs(const MarlinLaunch& args)
      : row_stride(4 * args.ldx),
        last(args.order == nullptr && args.aligned ? static_cast<int>(args.k) - 8 : -1),
        count(min(rows, args.m) - static_cast<int>(threadIdx.x) % 32 / 8) {
    const int lane = threadIdx.x % 32;
    from = static_cast<const Scalar*>(args.x) + lane / 8 * args.ldx + 8 * (lane % 8);
  }
  /// Starts bringing the tile in column `column`.
  __device__ void fetch(const MarlinLaunch& args, char* tile, int column) const {
    const int lane = threadIdx.x % 32;
    const int first = 64 * column + 8 * (lane % 8);
#pragma unroll
    for (int i = 0; i < (rows + 3) / 4; ++i) {
      if (4 * i >= count) break;
      char* const to = tile + MatrixOrder::place(lane / 8 + 4 * i, lane % 8);
      const Scalar* const row = from + i * row_stride;
      if (first <= last) {
        device::copy_async(to, row + 64 * column);
      } else {
        *reinterpret_cast<uint4*>(to) = gather(args, row - 8 * (lane % 8), first);
      }
    }
  }
};

}  // namespace w4q::kernels::integer
