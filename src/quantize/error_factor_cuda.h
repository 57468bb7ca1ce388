// ErrorFactor (error_factor.h) in GPU memory, made there.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "quantize/error_factor.h"
#include "quantize/gram_cuda.h"

namespace w4q::quantize {

class ErrorFactorCuda {
 public:
  /// As ErrorFactor. The factorization is cuSOLVER's in fp64 where the library can be loaded, the CPU's otherwise.
  ErrorFactorCuda(CudaWork& work, const GramCuda& gram, int64_t block, double damping, std::string_view name);

  int64_t width() const noexcept { return static_cast<int64_t>(order_.columns.size()); }
  int64_t block() const noexcept { return block_; }
  const ColumnOrder& order() const noexcept { return order_; }
  double damping() const noexcept { return damping_; }
  /// In GPU memory: the column at each position; D [k]; row j of the coupling [k, k] holds M_ij for i < j.
  const int32_t* columns() const noexcept { return columns_.as<int32_t>(); }
  const float* pivots() const noexcept { return pivots_.as<float>(); }
  const float* coupling() const noexcept { return coupling_.as<float>(); }

 private:
  void factor_on_cpu(CudaWork& work, const GramCuda& gram, std::string_view name);
  bool factor(CudaWork& work, const GramCuda& gram, double mean);

  int64_t block_;
  double damping_;
  ColumnOrder order_;
  device::DeviceBuffer columns_, pivots_, coupling_;
};

}  // namespace w4q::quantize
