// The product with int8 activations (int8_rows.h), sm_80 and newer, behind the launch that makes them.
#pragma once

#include "device/stream.h"
#include "kernels/integer/int8_tiling.h"
#include "kernels/integer/launch.cuh"

namespace w4q::kernels::int8 {

/// Inputs of one integer sum, which goes to an f32 sum with its group's scale.
constexpr int sum_inputs(int group_shift) { return group_shift < 2 ? 32 : chunk_inputs; }

/// What the product needs on top of its weight.
struct GemmLaunch : integer::MarlinLaunch {
  const uint8_t* rows_codes;  ///< Int8RowsArgs
  const float* rows_scales;
  const int16_t* rows_sums;  ///< for zero points
  int64_t padded;            ///< rows of x, a multiple of 128
  int chunks;                ///< of 128 inputs
  unsigned* counters;        ///< a tile, zero before
  float* partials;           ///< [tile][split][256 outputs × 128 rows], where splits > 1
  int splits;                ///< blocks that share a tile along k
  int row_tiles, output_tiles;
  bool bf16;     ///< y, where it is not f32
  bool vectors;  ///< y and the residual may be read and written four values at a time
};

void launch_gemm(const GemmLaunch& args, int bits, const device::Stream& stream, std::string_view shape);

}  // namespace w4q::kernels::int8
