// Searched scales, learned tables and error feedback for kbit on the GPU, all of it where the weights are.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/kbit_search.h"
#include "quantize/quantizer_registry.h"
#include "quantize/sweep_blocks_cuda.h"

namespace w4q::quantize {

/// quantize_searched: the same bytes. The weight stands in GPU memory in fp32 while it is worked on.
QuantizeResult quantize_searched_cuda(const TensorView& weight, const formats::Scheme& scheme,
                                      const QuantizeOptions& options, device::Context& gpu);

/// A matrix in GPU memory, finite, and what is wanted of it beside its planes.
struct KbitCudaWeight {
  std::string_view name;
  const float* values = nullptr;  ///< [n, k]
  int64_t n = 0, k = 0;
  FeedbackCuda feedback = {};
  const float* original = nullptr;  ///< [n, k], and …
  const float* rows = nullptr;      ///< … [n] or null for ones: …
  float* difference = nullptr;      ///< … original − decoded · rows; null: not wanted
};

/// learn_shared_table of the matrices as they stand, the largest blocks `room` times as large.
SharedTable shared_table_cuda(CudaWork& work, std::span<const KbitCudaWeight> weights, const formats::Scheme& scheme,
                              float room, const QuantizeOptions& options);

/// What kbit makes of it under `options`; `options.input->feedback` is not looked at.
QuantizeResult kbit_cuda(CudaWork& work, const KbitCudaWeight& weight, const formats::Scheme& scheme,
                         const QuantizeOptions& options);

}  // namespace w4q::quantize
