// Rows of a weight on their way through error feedback on the GPU: what integers and kbit have in common. Targets of
// all later columns are moved as soon as a block has been rounded.
#pragma once

#include <cstdint>

#include "core/text.h"
#include "device/check.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"

namespace w4q::quantize::cuda {

/// out[r][p] = weight[r][columns[p]], twice.
static __global__ void __launch_bounds__(256)
    order_kernel(const float* weight, int64_t n, int64_t k, const int32_t* columns, float* weights, float* targets) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at >= n * k) return;
  const float value = weight[at / k * k + columns[at % k]];
  weights[at] = value;
  targets[at] = value;
}

class FeedbackSteps {
 public:
  /// At most `widest` columns are rounded at a time.
  FeedbackSteps(CudaWork& work, const float* weight, int64_t n, const ErrorFactorCuda& factor, int64_t widest)
      : FeedbackSteps(work, n, factor, widest) {
    take(weight, 0, n);
  }
  /// Rows are taken later.
  FeedbackSteps(CudaWork& work, int64_t n, const ErrorFactorCuda& factor, int64_t widest)
      : work_(work), factor_(factor), n_(n), k_(factor.width()), memory_(work.stream, bytes(2 * n * k_ + n * widest)) {}
  /// `weight` [rows, k] are those from `first` on.
  void take(const float* weight, int64_t first, int64_t rows) {
    order_kernel<<<static_cast<unsigned>((rows * k_ + 255) / 256), 256, 0, work_.stream.get()>>>(
        weight, rows, k_, factor_.columns(), weights() + first * k_, targets() + first * k_);
    device::check_launch("feedback order", concat(rows, " × ", k_));
  }

  float* weights() noexcept { return memory_.as<float>(); }               ///< [n, k] by positions
  float* targets() noexcept { return memory_.as<float>() + n_ * k_; }     ///< the same, moved by errors so far
  float* errors() noexcept { return memory_.as<float>() + 2 * n_ * k_; }  ///< [n, columns] of the last block

  /// Moves the targets from position `end` on by the errors of positions [begin, end).
  void move_rest(int64_t begin, int64_t end) {
    if (end == k_) return;
    const int64_t cols = end - begin;
    device::cublas_multiply({.m = n_,
                             .n = k_ - end,
                             .k = cols,
                             .a = errors(),
                             .lda = cols,
                             .b = factor_.coupling() + end * k_ + begin,
                             .ldb = k_,
                             .c = targets() + end,
                             .ldc = k_,
                             .workspace = work_.cublas.data(),
                             .b_transposed = true,
                             .add = true},
                            work_.stream);
  }

 private:
  static size_t bytes(int64_t values) { return static_cast<size_t>(values) * sizeof(float); }

  CudaWork& work_;
  const ErrorFactorCuda& factor_;
  int64_t n_, k_;
  device::DeviceBuffer memory_;
};

}  // namespace w4q::quantize::cuda
