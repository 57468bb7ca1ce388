// Targets for quantized inputs (asymmetric.h) on the GPU: sums over both inputs, and the weights that follow them.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "quantize/asymmetric.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/statistics_cuda.h"

namespace w4q::quantize {

/// The mean of (x − x̂)ᵀx̂ in GPU memory, [k, k] row-major fp32.
class DriftCuda {
 public:
  /// Of sums in fp64 over `count` rows.
  DriftCuda(CudaWork& work, const double* sums, int64_t width, int64_t count);

  int64_t width() const noexcept { return width_; }
  int64_t tokens() const noexcept { return tokens_; }
  const float* data() const noexcept { return matrix_.as<float>(); }
  /// For inputs that are divided by `scales`.
  void divide(std::span<const float> scales);
  /// R · D · Rᵀ, for inputs that are rotated.
  void rotate(const RotationCuda& rotation);

 private:
  CudaWork& work_;
  int64_t width_, tokens_;
  device::DeviceBuffer matrix_;
};

/// InputPair, collected where the activations are.
class InputPairCuda {
 public:
  /// `work` must outlive this object.
  InputPairCuda(CudaWork& work, int64_t width);

  /// Adds rows x and x̂ [count, width] of f16 in GPU memory. Their difference is rounded to f16 once; sums as
  /// StatisticsCuda::add_rows.
  void add_rows(const __half* plain, const __half* quantized, int64_t count);

  /// What add_rows on the CPU would have left. Throws as StatisticsCuda::download.
  InputPair download(std::string_view name) const;
  /// The same with both matrices on the GPU.
  InputPair keep(std::string_view name) const;

 private:
  DriftCuda drift() const { return {work_, sums_.as<double>(), width_, count_}; }

  CudaWork& work_;
  int64_t width_, count_ = 0;
  StatisticsCuda quantized_;
  device::DeviceBuffer sums_;   ///< Σ (x − x̂)ᵀx̂, fp64
  device::DeviceBuffer apart_;  ///< x − x̂ of some rows
};

/// follow_inputs() for `weight` [n, k] in GPU memory. `gram` is that of the quantized inputs, which `factor` is of.
void follow_inputs_cuda(CudaWork& work, float* weight, int64_t n, const DriftCuda& drift, const GramCuda& gram,
                        const ErrorFactorCuda& factor, const MoveLimit& limit);

}  // namespace w4q::quantize
