// Activations for Marlin's words: a lane's B operand is the inputs 2t, 2t + 1 and 2t + 8, 2t + 9 of a step.
#pragma once

#include "device/async_copy.cuh"
#include "kernels/integer_tile.cuh"

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
  /// Four 8 × 8 matrices, whose rows are where the 32 lanes say.
  __device__ static uint4 read(const char* at) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at)))
                 : "memory");
    return x;
  }
  /// This lane's B registers of one block for `groups` groups of eight rows.
  template <int groups>
  __device__ static void read(const char* tile, int block, uint4 (&x)[groups]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < groups; ++i) x[i] = read(tile + place(8 * i + lane % 8, 4 * block + lane / 8));
  }
};

/// Activations straight from global memory, for one row.
template <class Scalar>
struct InputReader {
  const int32_t* order;
  int k;
  bool pairs_aligned;

  __device__ explicit InputReader(const MarlinLaunch& args)
      : order(args.order), k(static_cast<int>(args.k)), pairs_aligned(args.aligned) {}

  /// The lane's eight of the 32 inputs from `first` on, the two steps one after the other; zeros beyond k.
  __device__ uint4 load(const Scalar* row, int first) const {
    const int column = first + 2 * (threadIdx.x % 4);
    uint32_t words[4];
    if (pairs_aligned && order == nullptr && first + 32 <= k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __ldg(reinterpret_cast<const uint32_t*>(row + column + 8 * i));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = one(row, column + 8 * i) | one(row, column + 8 * i + 1) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

 private:
  __device__ uint32_t one(const Scalar* row, int column) const {
    if (column >= k) return 0;
    const int from = order == nullptr ? column : __ldg(order + column);
    return __ldg(reinterpret_cast<const unsigned short*>(row) + from);
  }
};

}  // namespace w4q::kernels::integer
