// What a launch of the GEMV of rotated weights needs.
#pragma once

#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::rotated {

/// One pass of a launch.
struct Source {
  const uint4* codes;
  const uint4* norms;
  const float* levels;
  const uint32_t* signs;  ///< of its rotation (rotation_signs)
  int groups;             ///< norms of an output
  int group_shift;        ///< a group is 2^group_shift inputs; 31: all are one group
  int table_exponent;     ///< the levels times two to this is what its table holds
  float factor;           ///< its sums times this are on the scale of the first pass's
};

/// Up to two passes side by side: tiles of both stand in a row, first those of the one, then those of the other.
struct RotatedLaunch : kbit::Launch {
  Source sources[2];
  int passes;            ///< 1 or 2
  int pass_tiles;        ///< tiles along k of one pass
  bool rotates;          ///< x is yet to be rotated, one row
  int block;             ///< of the rotation, where it rotates: 32, 64 or 128
  int64_t input_stride;  ///< not rotating: elements from one rotated input to the other
};

/// Which widths of codes one launch takes together.
inline bool widths_fit(int first, int second) {
  return (first == second && (first == 3 || first == 4)) || (first == 4 && second == 2);
}

/// 1 to 16 rows of f16 (rotated_gemv_cuda.cu). `second_bits` is 0 where there is one pass.
void launch_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, cudaStream_t stream,
                 std::string_view shape);
/// One row, with what lies between products (rotated_gemv_fused_cuda.cu).
void launch_fused_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, cudaStream_t stream,
                       std::string_view shape);

}  // namespace w4q::kernels::rotated
