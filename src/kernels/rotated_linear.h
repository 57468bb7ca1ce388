// y = Σ_p W_p · R_p(x ⊘ s) + b on the GPU for passes of rotated schemes: rotates the activations, once for passes that
// share a rotation, and multiplies each pass with the kbit kernels (kbit_linear.h), whose agreement it has. A pass is
// uploaded as formats::rotated_as_kbit gives it, in a layout that those kernels read.
//
// Launches: one rotation for each different R and one product for each pass; further passes add to the sum in their
// epilogue.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <span>

#include "kernels/kbit_linear.h"

namespace w4q::kernels {

struct RotatedDevicePass {
  KbitDeviceWeight weight;
  int64_t block = 1;               ///< of its rotation; 1: none
  const float* factors = nullptr;  ///< [k], equal pointers for passes that share a rotation
};

struct RotatedLinearArgs {
  int64_t m = 0;
  DType activation = DType::f16;
  const void* x = nullptr;  ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  const float* input_scale = nullptr;  ///< [k], or null
  std::span<const RotatedDevicePass> passes;
  const float* bias = nullptr;  ///< [n], or null
  void* y = nullptr;            ///< [m, n], rows `ldy` elements apart
  int64_t ldy = 0;
  void* workspace = nullptr;  ///< rotated_linear_workspace() bytes, aligned to 256, zeroed once before its first use
  size_t workspace_bytes = 0;
};

/// Bytes of workspace for up to `m` rows.
size_t rotated_linear_workspace(int64_t m, int64_t n, int64_t k);

/// Launches on `stream`. Throws as kbit_linear and rotate_input do.
void rotated_linear(const RotatedLinearArgs& args, cudaStream_t stream);

}  // namespace w4q::kernels
