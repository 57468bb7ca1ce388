// The kernel of gemv_cuda.cu and gemv_fused_cuda.cu.
#pragma once

#include "kernels/frame/gemv_block.cuh"
#include "kernels/integer/gemv_run.cuh"
#include "kernels/integer/launch.cuh"

namespace w4q::kernels::integer {

/// The shape of a block: warps, and tiles of each in flight; as many as shared memory holds beside the sums. Sixteen
/// rows fill it with activations: where a block may have more than 99 KB (sm_80 and sm_90 have 163 and 227), there is a
/// `large` shape.
template <int bits, int rows, bool large>
struct Shape {
  static constexpr int with_16_rows = bits == 4 ? (large ? 12 : 7) : (large ? 9 : 5);
  static constexpr int with_8_rows = bits == 4 ? 11 : 7;
  static constexpr int with_1_row = bits == 4 ? 12 : 10;
  static constexpr int warps = rows == 16 ? with_16_rows : rows == 8 ? with_8_rows : with_1_row;
  static constexpr int depth = bits == 4 && rows == 1 ? 3 : 2;
};

template <int bits, class Activation, bool with_zeros, int most_rows, bool large, bool fuses>
struct IntegerGemv {
  using Args = MarlinLaunch;
  using Type = Activation;
  static constexpr int rows = most_rows;
  static constexpr bool fused = fuses;
  static constexpr int warps = Shape<bits, rows, large>::warps;
  static constexpr int depth = Shape<bits, rows, large>::depth;
  using Totals = RowTotals<rows>;
  using Run = integer::Run<bits, Type, with_zeros, rows, depth>;

  /// Nothing to look up; in front of the sums are the tiles on their way.
  using Table = frame::NoTable<warps * depth * Stage<bits, with_zeros, rows>::bytes, warps * 64 * rows * 4>;
};

/// One row, nothing fused: registers leave room for a block of the next launch beside this one, where shared memory
/// does (sm_80 and sm_90).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ % 100 / 10 != 0
constexpr int blocks_beside = 1;
#else
constexpr int blocks_beside = 2;
#endif

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, Gemv::rows == 1 && !Gemv::fused ? blocks_beside : 1)
    integer_gemv_kernel(const MarlinLaunch args) {
  gemv_block<Gemv>(args);
}

template <class Gemv>
constexpr int shared_bytes = Gemv::Table::total_bytes + frame::PartialSums<Gemv::rows, Gemv::warps>::extra_bytes;

template <int bits, class Type, bool with_zeros, int rows, bool large = false, bool fused = false>
void launch_rows(const MarlinLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  using Gemv = IntegerGemv<bits, Type, with_zeros, rows, large, fused>;
  constexpr int most = large ? large_shared_bytes : least_shared_bytes;
  // Two blocks fit a multiprocessor's shared memory: those of a launch that begins early would stand two by two.
  constexpr bool keep_apart = true;
  frame::launch_kernel<integer_gemv_kernel<Gemv>, shared_bytes<Gemv>, most, keep_apart>(args, blocks, Gemv::warps * 32,
                                                                                        stream, "integer_gemv", shape);
}

}  // namespace w4q::kernels::integer
