// kbit with searched scales, with and without error feedback, from weights in GPU memory (kbit_search.h, feedback.h).
#pragma once

#include <cstdint>
#include <span>

#include "formats/packed.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/quantizer_registry.h"
#include "quantize/sweep_blocks_cuda.h"

namespace w4q::quantize {

/// Fills codes and scales of `packed`, whose codebook stands, from `weight` [n, k] in GPU memory. `importance` [k]
/// weighs errors: the bytes of quantize_searched. With a factor errors are fed back along k instead, which decides the
/// importance; the decisions inside a block are those of the CPU, but targets are added up in another order. Counts
/// blocks as block_stats does, without the exponent. Then difference [n, k] = original − decoded · rows, unless
/// it is null; `rows` [n] may be null for ones.
QuantizeStats kbit_rows_cuda(CudaWork& work, const float* weight, std::span<const float> importance,
                             const FeedbackCuda& feedback, Scales scales, const float* original, const float* rows,
                             float* difference, formats::PackedWeight& packed);

}  // namespace w4q::quantize
