// cuBLAS, found when it is first needed: a program that never multiplies wide matrices runs without it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace w4q::device {

/// True when the library that this program was built for can be loaded on this machine.
bool have_cublas();

/// Workspace that a product wants, in bytes.
inline constexpr size_t cublas_workspace_bytes = size_t{32} << 20;

/// y[m][n] = x[m][k] · w[n][k]ᵀ, x and w f16 or bf16, y of their type or fp32, fp32 accumulation; rows `ld…` elements
/// apart. `workspace` has cublas_workspace_bytes, aligned to 256. May be captured into a graph after a first call
/// outside of one. Throws device when the library is missing or refuses.
struct CublasProduct {
  int64_t m, n, k;
  DType dtype;
  const void* x;
  int64_t ldx;
  const void* w;
  int64_t ldw;
  void* y;
  int64_t ldy;
  void* workspace;
  bool fp32_output = false;
  bool add = false;  ///< y += instead of y =
};
void cublas_multiply(const CublasProduct& product, cudaStream_t stream);

}  // namespace w4q::device
