// Integers from weights in GPU memory: rounded to nearest (rtn.h), or with error feedback (feedback.h).
#pragma once

#include <cstdint>

#include "formats/packed.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/quantizer_registry.h"
#include "quantize/sweep_blocks_cuda.h"

namespace w4q::quantize {

/// Fills the planes of `packed` from `weight` [n, k], finite, in GPU memory: the bytes of rtn. With a factor errors are
/// fed back along k; along n too where that is asked for; the decisions inside a group are those of the CPU, but targets are added up in another order. Then
/// difference [n, k] = original − decoded · rows; `rows` [n] may be null for ones.
QuantizeStats integer_rows_cuda(CudaWork& work, const float* weight, const FeedbackCuda& feedback, Clip clip,
                                const float* original, const float* rows, float* difference,
                                formats::PackedWeight& packed);

}  // namespace w4q::quantize
