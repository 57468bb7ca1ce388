// Sweeps: coordinate descent behind error feedback. Feedback decides each column once, and never looks back; here blocks
// and single codes are decided again, given all others, as long as the error of the outputs falls (docs/quality.md).
#pragma once

#include "core/views.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Lessens e·H·eᵀ of every row of errors e = Ŵ − W, where H is the damped Gram matrix that `options.input->feedback` is
/// a factor of, or leaves the row as it is; where the input has `outputs`, tr(H_O·E·H·Eᵀ), H_O likewise. `weight` [n, k] is what `packed` was made from: canonical planes of a scheme
/// that feedback serves. Two sweeps over blocks, each rounded with feedback inside it under all the scales that feedback
/// tries, then one over single codes; blocks of more than 256 columns keep their scales. The bytes do not depend on the
/// number of threads. Throws bad_argument when the input has no Gram matrix of this width, or none of the outputs.
void sweep(const TensorView& weight, const QuantizeOptions& options, formats::PackedWeight& packed);

}  // namespace w4q::quantize
