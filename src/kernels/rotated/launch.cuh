// What a launch of the GEMV of rotated weights needs.
#pragma once

#include "kernels/frame/launch.cuh"
#include "kernels/rotated/share.cuh"

namespace w4q::kernels::rotated {

/// One pass of a launch.
struct Source {
  const uint4* codes;
  const uint4* norms;
  const float* levels;
  const uint32_t* signs;  ///< of its rotation (rotation_signs)
  int groups;             ///< norms of an output
  int group_shift;        ///< a group is 2^group_shift inputs; 31: all are one group
  float table_factor;     ///< the levels times this are what its table holds
  float factor;           ///< its sums times this are on the scale of the first pass's
};

/// Up to two passes side by side: tiles of both stand in a row, first those of the one, then those of the other.
struct RotatedLaunch : frame::Launch {
  Source sources[2];
  int passes;            ///< 1 or 2
  int pass_tiles;        ///< tiles along k of one pass
  bool rotates;          ///< x is yet to be rotated, one row: by every warp
  int block;             ///< of the rotation, where it rotates: 32, 64 or 128
  int64_t input_stride;  ///< not rotating: elements from one rotated input to the other
  SharedInputs inputs;   ///< what the blocks make `x` of together, or nothing
};

/// `x` where the blocks make it.
__device__ __forceinline__ RowShare row_share(const RotatedLaunch& args) {
  return {args.inputs, const_cast<__half*>(static_cast<const __half*>(args.x)), args.ldx, args.input_stride};
}
/// As frame/launch.cuh has them.
template <int warps>
__device__ __forceinline__ void begin_inputs(const RotatedLaunch& args) {
  if (args.inputs.barrier != nullptr) row_share(args).begin<warps>();
}
template <int warps>
__device__ __forceinline__ uint32_t finish_inputs(const RotatedLaunch& args) {
  if (args.inputs.barrier != nullptr) return row_share(args).finish<warps>();
  device::wait_grid_dependency();
  return 0;
}
__device__ __forceinline__ void close_inputs(const RotatedLaunch& args, uint32_t token) {
  if (args.inputs.barrier != nullptr && threadIdx.x == 0) frame::empty_if_last(args.inputs.barrier, token);
}

/// Which widths of codes one launch takes together.
inline bool widths_fit(int first, int second) {
  return (first == second && (first == 3 || first == 4)) || (first == 4 && second == 2);
}

/// 1 to 16 rows of f16 (gemv_cuda.cu). `second_bits` is 0 where there is one pass.
void launch_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, const device::Stream& stream,
                 std::string_view shape);
/// 17 to 64 rows of f16 (gemm_cuda.cu), one pass or two of equal widths.
void launch_gemm(const RotatedLaunch& args, int bits, int blocks, const device::Stream& stream, std::string_view shape);
/// One row, with what lies between products (gemv_fused_cuda.cu).
void launch_fused_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks,
                       const device::Stream& stream, std::string_view shape);

}  // namespace w4q::kernels::rotated
