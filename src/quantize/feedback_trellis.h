// Error feedback for the trellis family: the scales of rows stand, and columns are rounded one after the other, a strip
// of rows at a time.
#pragma once

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Columns that stand together in the factor. Feedback is exact to the column all the same.
inline constexpr int64_t trellis_feedback_block = 32;

/// As quantize_with_feedback (feedback.h), for weights of the trellis family whose factor fits.
QuantizeResult trellis_feedback(const TensorView& weight, const formats::Scheme& scheme,
                                const QuantizeOptions& options);

}  // namespace w4q::quantize
