// Error feedback for small floats and bitsandbytes' tables: a block's scale is chosen from its moved weights, where it has one for itself, then
// its columns are rounded one after the other.
#pragma once

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// As quantize_with_feedback (feedback.h), for small floats and lut, whose factor fits. Scales of several rows, and nested ones,
/// are chosen before.
QuantizeResult float_feedback(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options);

}  // namespace w4q::quantize
