// InputStatistics collected where the activations are: in GPU memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "quantize/gram_cuda.h"

namespace w4q::quantize {

class StatisticsCuda {
 public:
  /// `work` must outlive this object.
  StatisticsCuda(CudaWork& work, int64_t width, bool with_gram);

  /// Adds rows [rows, width] of f16 in GPU memory. Products on tensor cores with fp32 sums over at most 4096 rows, sums
  /// of them in fp64 (class E2 against add_rows of the same values); nothing waits.
  void add_rows(const __half* rows, int64_t count);

  /// The same for rows of f32, products with operands rounded to TF32.
  void add_rows(const float* rows, int64_t count);

  /// What add_rows on the CPU would have left. Throws bad_file naming `name` when a value was not finite.
  InputStatistics download(std::string_view name) const;
  /// The same without the Gram matrix.
  InputStatistics channels(std::string_view name) const;
  /// The mean of xᵀx as its upper triangle, in work.square. Throws as download().
  const float* mean_triangle(std::string_view name) const;
  /// supported_gram(), which stays on the GPU.
  GramCuda gram() const { return {work_, gram_.as<double>(), width_, count_}; }
  bool has_gram() const noexcept { return gram_.size() > 0; }

 private:
  template <class T, class Multiply>
  void add(const T* rows, int64_t count, const Multiply& multiply);

  CudaWork& work_;
  int64_t width_;
  int64_t count_ = 0;
  device::DeviceBuffer sums_;  ///< Σ |x|, then Σ x²
  device::DeviceBuffer gram_;  ///< the upper triangle, fp64
};

}  // namespace w4q::quantize
