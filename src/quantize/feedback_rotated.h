// Error feedback for the rotated family: a group's norm is chosen from its moved weights, then its columns are rounded
// one after the other.
#pragma once

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// As quantize_with_feedback (feedback.h), for weights of the rotated family whose factor fits.
QuantizeResult rotated_feedback(const TensorView& weight, const formats::Scheme& scheme,
                                const QuantizeOptions& options);

}  // namespace w4q::quantize
