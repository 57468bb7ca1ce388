// Many activation rows of two rotated passes: their sum is decoded to 16 bits a strip of outputs at a time and
// multiplied by cuBLAS, once for both.
#pragma once

#include "kernels/rotated/launch.cuh"

namespace w4q::kernels::rotated {

/// Strip and cuBLAS' memory, aligned to 256.
size_t wide_bytes(int64_t n, int64_t k);

struct WideArgs {
  int64_t m, n, k;
  const void* x;  ///< [m, k] f16, rotated, rows `ldx` elements apart
  int64_t ldx;
  Source sources[2];
  int bits[2];  ///< of widths_fit
  const float* bias;
  void* y;  ///< [m, n] f16 or f32, rows `ldy` elements apart
  int64_t ldy;
  bool fp32;     ///< y is f32
  bool add;      ///< y += instead of y =
  void* memory;  ///< wide_bytes()
};

/// Sums enter as 16-bit roundings; a bias is added to the result, to a 16-bit one with a rounding of its own. Needs
/// device::have_cublas().
void run_wide(const WideArgs& args, cudaStream_t stream);

}  // namespace w4q::kernels::rotated
