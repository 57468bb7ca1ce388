// Weights and statistics of a linear layer in the rotated basis of its inputs (formats/rotation.h): W·Rᵀ and R·G·Rᵀ.
#pragma once

#include "core/views.h"
#include "formats/rotation.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {

/// Each row ← R · row, which makes W·Rᵀ of W.
void rotate_rows(MatrixView<float> weight, const formats::InputRotation& rotation);
/// Undoes it.
void restore_rows(MatrixView<float> weight, const formats::InputRotation& rotation);
/// A symmetric matrix ← R · G · Rᵀ.
void rotate_gram(MatrixView<float> gram, const formats::InputRotation& rotation);
/// Undoes it.
void restore_gram(MatrixView<float> gram, const formats::InputRotation& rotation);

/// Any matrix of products of inputs ← R · D · Rᵀ.
void rotate_products(MatrixView<float> products, const formats::InputRotation& rotation);
/// Undoes it.
void restore_products(MatrixView<float> products, const formats::InputRotation& rotation);

/// How weights are rounded when they are rounded in that basis: rows must be whole. `rotation` must outlive it.
quantize::Rounding in_rotated_basis(quantize::Rounding rounding, const formats::InputRotation& rotation);

}  // namespace w4q::pipeline
