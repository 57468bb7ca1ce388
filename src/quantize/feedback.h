// Error feedback: columns are rounded one after the other, and each is rounded after it has been moved by what the
// errors of the columns before it are worth to the layer's output (GPTQ's and LDLQ's rule, docs/quality.md).
#pragma once

#include "core/views.h"
#include "quantize/error_factor.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Columns that must stay together under `scheme`, for the factor of a Gram matrix of width k.
int64_t feedback_block(const formats::Scheme& scheme, int64_t k) noexcept;

/// The same for outputs, where errors are fed back along n too: rows of a ring are rounded at once, others one by one.
int64_t output_block(const formats::Scheme& scheme) noexcept;

/// kbit and the integers through options.input->feedback. A block's scale is chosen when the block is reached, from the
/// weights as they have been moved. The bytes do not depend on the number of threads. Holds the weight in fp32 once
/// more. Throws unsupported for an integer scheme with act order, bad_argument when the factor has another width or
/// block.
QuantizeResult quantize_with_feedback(const TensorView& weight, const formats::Scheme& scheme,
                                      const QuantizeOptions& options);

/// Of integers: counts anew what sweeps may have changed.
void count_scales(const formats::PackedWeight& packed, QuantizeStats& stats);

}  // namespace w4q::quantize
