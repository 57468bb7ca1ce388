// What learning a table asks of weights in GPU memory (table_learning.h): the CPU's sample of rows, its choices and its
// order of additions, bit for bit (class E0). On the CPU it takes seconds for each expert of a mixture.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quantize/cuda_work.h"
#include "quantize/quantizer_registry.h"
#include "quantize/table_learning.h"

namespace w4q::quantize {

class TableSumsCuda {
 public:
  /// A matrix [n, k] of fp32 in GPU memory, finite.
  struct Weight {
    const float* values = nullptr;
    int64_t n = 0, k = 0;
  };
  /// Weights of kbit with the same inputs, of which `importance` [k] is known. `work` and the matrices outlive this.
  TableSumsCuda(CudaWork& work, std::span<const Weight> weights, const formats::Scheme& scheme,
                std::span<const float> importance, Scales rule);

  /// SumEntries.
  EntrySums operator()(std::span<const float> codebook) const;

 private:
  CudaWork& work_;
  std::vector<Weight> weights_;
  formats::Scheme scheme_;
  Scales rule_;
  int64_t panels_ = 0;           ///< of all weights
  device::DeviceBuffer memory_;  ///< importance; of one weight at a time scales and codes; sums of all panels
  float* importance_ = nullptr;
  float* scales_ = nullptr;
  uint8_t* codes_ = nullptr;
  double* sums_ = nullptr;
};

}  // namespace w4q::quantize
