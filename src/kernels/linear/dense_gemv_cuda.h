// y = W · x for one row of f16 activations and f16 weights as they stand in a checkpoint. Memory-bound: it reads 2·n·k
// bytes, which at the card's read bandwidth is the time below which it cannot go. fp32 products and sums in a fixed
// order (class E2).
#pragma once

#include <cuda_fp16.h>
#include <cstdint>

#include "device/stream.h"

namespace w4q::kernels {

struct DenseGemvArgs {
  const __half* weight = nullptr;  ///< [n × k], aligned to 16, k a multiple of 8
  const __half* x = nullptr;       ///< [k], aligned to 16
  const float* bias = nullptr;     ///< [n], or null
  int64_t n = 0, k = 0;
  /// Exactly one of these says what becomes of the products.
  __half* out = nullptr;      ///< [n]
  float* out_fp32 = nullptr;  ///< [n]
  float* residual = nullptr;  ///< [n]: added to it
  __half* gated = nullptr;    ///< [n/2]: silu(first half) · second half
  bool overlap = false;       ///< elementwise_cuda.h; the weight was complete before the previous launch began
};

/// Whether these sizes are taken.
constexpr bool dense_gemv_accepts(int64_t n, int64_t k) { return n >= 1 && k >= 8 && k % 8 == 0; }
void dense_gemv_cuda(const DenseGemvArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
