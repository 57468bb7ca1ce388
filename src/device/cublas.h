// cuBLAS, found when it is first needed: a program that never multiplies wide matrices runs without it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

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
void cublas_multiply(const CublasProduct& product, const Stream& stream);

/// c[m][n] = op(a) · op(b) in fp32, rows `ld…` elements apart; op(a) is [m][k], stored [k][m] where
/// `a_transposed`, and op(b) is [k][n], stored [n][k] where `b_transposed`. Otherwise as cublas_multiply.
struct CublasFloatProduct {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t lda = 0;
  const float* b = nullptr;
  int64_t ldb = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  void* workspace = nullptr;
  bool a_transposed = false;
  bool b_transposed = false;
  bool add = false;
  bool tensor_cores = false;  ///< operands are rounded to eleven bits (TF32) where the GPU has such products
  int64_t count = 1;          ///< products side by side, of matrices `…_apart` elements apart
  int64_t a_apart = 0;
  int64_t b_apart = 0;
  int64_t c_apart = 0;
};
void cublas_multiply(const CublasFloatProduct& product, const Stream& stream);

/// c[k][k] = xᵀ · y for x and y [rows][k] of f16, fp32 accumulation.
void cublas_gram(const void* x, const void* y, int64_t rows, int64_t k, float* c, void* workspace,
                 const Stream& stream);

/// Rows b [m][k] in place: b · T⁻¹, where T or, with `transposed`, Tᵀ is `lower` [k][k], whose diagonal counts as ones
/// and whose upper triangle is not read; fp32, rows one behind the other.
void cublas_solve(const float* lower, bool transposed, float* b, int64_t m, int64_t k, void* workspace,
                  const Stream& stream);

}  // namespace w4q::device
