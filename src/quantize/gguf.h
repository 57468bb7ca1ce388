// Weights as GGUF blocks of least error: scales searched with what calibration knows of the inputs, errors fed back
// along k (docs/gguf.md).
#pragma once

#include "core/buffer.h"
#include "core/views.h"
#include "formats/gguf_forms.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// Rounds a matrix [n, k] of f32, f16 or bf16, k a multiple of form.block, to the blocks of its rows, one row behind the
/// other. `input` may be null: then all weights count alike. Its mean squares weigh errors; through its feedback, whose
/// blocks are form.block wide, errors move what is rounded after them: the scales of a block are chosen when it is
/// reached, from the weights as they have been moved. The bytes do not depend on the number of threads. Throws bad_file
/// naming tensor, row and column of a weight that is not finite, unsupported of one that no block can hold.
Buffer gguf_blocks(const TensorView& weight, const formats::GgufForm& form, const CalibratedInput* input);

}  // namespace w4q::quantize
