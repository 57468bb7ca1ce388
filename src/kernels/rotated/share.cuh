// Rotated activations that the blocks of one launch make together: each rotates a share of them into global memory,
// which the L2 cache keeps, counts itself in, and goes on when all have. A launch more would take longer, and every
// strip of outputs would repeat a rotation that warps make for themselves.
//
// Nobody depends on blocks that have not begun: whoever waits far longer than a share takes (they do not fit beside
// what other streams run) makes all shares by itself. The others' write the same bytes to the same places.
#pragma once

#include "kernels/frame/grid_barrier.cuh"
#include "kernels/frame/tile.cuh"
#include "kernels/rotated/input.cuh"

namespace w4q::kernels::rotated {

/// What is to be made of x, and how.
struct SharedInputs {
  const __half* x;  ///< [m, k], rows `ldx` elements apart
  int64_t ldx;
  int m, k;
  bool aligned;              ///< rows may be read 16 bytes at a time
  int rotations;             ///< of the same x: 1 or 2
  int block;                 ///< of theirs: 32, 64 or 128; 1: x is rotated already
  const uint32_t* signs[2];  ///< rotation_signs
  uint32_t* barrier;         ///< a word that is zero between launches; null: nothing is made
};

constexpr int piece_inputs = 256;  ///< of a row, for a warp

/// Makes every `stride`-th piece from piece `first` on, numbers that a warp's lanes agree on: store(rotation, row,
/// input, words) gets a lane's eight from input `input` on, zeros beyond k.
template <class Store>
__device__ __forceinline__ void make_inputs(const SharedInputs& inputs, int first, int stride, const Store& store) {
  const FragmentRotation rotation(inputs.block);
  const int of_row = (inputs.k + piece_inputs - 1) / piece_inputs;
  const int of_rotation = of_row * inputs.m;
  const int count = of_rotation * inputs.rotations;
  const auto column_of = [&](int i) { return i % of_row * piece_inputs + 8 * static_cast<int>(threadIdx.x % 32); };
  const auto load = [&](int i) {
    const int column = column_of(i), left = inputs.k - column;
    const __half* const from = inputs.x + i % of_rotation / of_row * inputs.ldx + column;
    RawInputs raw{};
    raw.x = inputs.aligned && left >= 8 ? __ldg(reinterpret_cast<const uint4*>(from)) : frame::load_ragged(from, left);
    if (inputs.block > 1 && left > 0) raw.signs = __ldg(inputs.signs[i / of_rotation] + column / 32);
    return raw;
  };
  RawInputs next{};
  if (first < count) next = load(first);
  for (int i = first; i < count; i += stride) {
    const RawInputs raw = next;
    if (i + stride < count) next = load(i + stride);
    const uint4 words = inputs.block > 1 ? rotation.rotate(raw) : raw.x;
    store(i / of_rotation, i % of_rotation / of_row, column_of(i), words);
  }
}

/// A block's part in this, where rows are to stand as they are: from begin() to finish() it may do something else. All
/// threads.
struct RowShare {
  const SharedInputs& inputs;
  __half* const to;      ///< [rotation][m] rows `stride` elements apart
  const int64_t stride;  ///< k and what is beyond, up to whole tiles of 64
  const int64_t rotation_stride;

  template <int warps>
  __device__ __forceinline__ void begin() const {
    device::wait_grid_dependency();
    make(static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32)), static_cast<int>(gridDim.x) * warps);
    __syncthreads();
    if (threadIdx.x == 0) frame::arrive(inputs.barrier);
  }
  /// What is to be given to frame::empty_if_last() in the end.
  template <int warps>
  __device__ __forceinline__ uint32_t finish() const {
    if (__syncthreads_or(threadIdx.x == 0 && !frame::wait_for_arrivals(inputs.barrier)) != 0) {
      make(static_cast<int>(threadIdx.x / 32), warps);
      __syncthreads();
    }
    return threadIdx.x == 0 ? frame::leave(inputs.barrier) : 0;
  }

 private:
  __device__ __forceinline__ void make(int first, int step) const {
    make_inputs(inputs, first, step, [&](int rotation, int row, int column, const uint4& words) {
      if (column >= stride) return;
      *reinterpret_cast<uint4*>(to + rotation * rotation_stride + row * stride + column) = words;
    });
  }
};

}  // namespace w4q::kernels::rotated
