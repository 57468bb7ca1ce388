// Rotations, norms and scales multiplied into a weight matrix: what folding does to one tensor (docs/fold.md, docs/awq.md).
#pragma once

#include <span>

#include "core/views.h"
#include "formats/rotation.h"

namespace w4q::model {

/// Each column times or over its scale, such as the weight of the norm before it; each row. As many scales as columns or
/// rows.
void multiply_columns(MatrixView<float> weight, std::span<const float> scales);
void divide_columns(MatrixView<float> weight, std::span<const float> scales);
void multiply_rows(MatrixView<float> weight, std::span<const float> scales);
void divide_rows(MatrixView<float> weight, std::span<const float> scales);

/// W ← W · (I ⊗ R)ᵀ: each rotation.k() inputs of a row are rotated, so that the product with rotated inputs is what it
/// was with the others. The columns are a multiple of rotation.k().
void turn_inputs(MatrixView<float> weight, const formats::InputRotation& rotation);

/// W ← (I ⊗ R) · W: each rotation.k() outputs are rotated. The rows are a multiple of rotation.k().
void turn_outputs(MatrixView<float> weight, const formats::InputRotation& rotation);

}  // namespace w4q::model
