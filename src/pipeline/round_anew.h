// Weights that another dialect cannot say, rounded to the nearest that it can; and what that costs.
#pragma once

#include "formats/packed.h"
#include "formats/rotation.h"
#include "formats/scheme.h"
#include "pipeline/gguf_rows.h"

namespace w4q::pipeline {

/// The weights that a canonical linear stands for (the sum of its passes over the input scale) rounded to nearest under
/// `scheme`, in the order of the inputs, which `rotation` turns: an integer scheme without act order.
formats::PackedWeight round_anew(const formats::PackedLinear& source, const formats::Scheme& scheme,
                                 const formats::Rotation& rotation);

/// What `rounded`, whose inputs `rotation` turns, differs from `source` in.
ConversionError rounding_error(const formats::PackedLinear& source, const formats::PackedWeight& rounded,
                               const formats::Rotation& rotation);

}  // namespace w4q::pipeline
