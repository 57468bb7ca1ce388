// The quantizer of the EXL3 family (docs/exl3.md): scales of outputs and inputs, tiles of the least squared error by
// Viterbi's algorithm over 2^16 states and, where calibration is given, its errors fed back along the inputs, 16 at a
// time, in the basis in which tiles are rounded.
#pragma once

#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The registry row. With options.input->feedback it goes by options.input->gram: the factor must be that of the rotated
/// inputs, which it makes itself.
QuantizerRow exl3_quantizer();

/// Scales of outputs by least squares of what they put out: `packed` n × k, `weight` n × k what it was made from, `gram`
/// [k, k] the mean xᵀx of its inputs. Returns how many changed.
int64_t fit_exl3_outputs(formats::PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram);

}  // namespace w4q::quantize
