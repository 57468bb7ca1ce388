// AWQ's two searches (awq.h) for integer schemes, kbit and trellises, on weights and a Gram matrix in GPU memory. Scales, rounding
// and the order of decisions are the CPU's; only sums of products are added in another order.
#pragma once

#include <cstdint>
#include <span>

#include "formats/scheme.h"
#include "quantize/awq.h"
#include "quantize/gram_cuda.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// A linear's weights in GPU memory and how they are rounded.
struct AwqCudaLinear {
  float* weight = nullptr;  ///< [n, k]
  int64_t n = 0;
  formats::Scheme scheme;
  Clip clip = Clip::min_max;
  std::span<const float> table;  ///< kbit's, on the CPU
};

/// False for schemes that these searches do not round to.
bool awq_cuda_accepts(const formats::Scheme& scheme) noexcept;

/// difference [n, k] = w − round(w · s) ⊘ s, rounded in the basis of `rotation` if there is one; `scales` [k] in GPU
/// memory, or null for none.
void rounding_error_cuda(CudaWork& work, const AwqCudaLinear& linear, int64_t k, const float* scales, float* difference,
                         const RotationCuda* rotation = nullptr);

/// search_scales; `input.gram` is not looked at. `plain_error` is what rounding without scales
/// gives, which is not done again; with a rotation it is, in its basis.
AwqScales search_scales_cuda(CudaWork& work, std::span<const AwqCudaLinear> linears, const AwqInput& input,
                             const GramCuda& gram, double plain_error, const RotationCuda* rotation = nullptr);

/// search_clip, for integer schemes. Changes the weights in place.
AwqClip search_clip_cuda(CudaWork& work, const AwqCudaLinear& linear, const GramCuda& gram);

}  // namespace w4q::quantize
