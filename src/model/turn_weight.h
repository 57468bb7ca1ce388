// Rotations and norms multiplied into a weight matrix: what folding does to one tensor (docs/fold.md).
#pragma once

#include <span>

#include "core/views.h"
#include "formats/rotation.h"

namespace w4q::model {

/// Each column times the weight of the norm before it. As many weights as columns.
void fold_norm(MatrixView<float> weight, std::span<const float> norm);

/// W ← W · (I ⊗ R)ᵀ: each rotation.k() inputs of a row are rotated, so that the product with rotated inputs is what it
/// was with the others. The columns are a multiple of rotation.k().
void turn_inputs(MatrixView<float> weight, const formats::InputRotation& rotation);

/// W ← (I ⊗ R) · W: each rotation.k() outputs are rotated. The rows are a multiple of rotation.k().
void turn_outputs(MatrixView<float> weight, const formats::InputRotation& rotation);

}  // namespace w4q::model
