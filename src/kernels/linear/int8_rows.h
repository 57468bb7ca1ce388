// Rows of activations as int8, for products with integer weights whose sums are integers (W4A8, W8A8). An option of how
// a model is run, for prompts: int8_activations of the decoders.
//
// A row's scale is s = max |x| / 127 in f32, its codes are q = x / s to the nearest integer, ties to even, held to
// ±127. A row of zeros has s = 0; so has one whose s is 0 in f32. A row with a value that is not finite has s = NaN and
// codes 0, so that a product with it is not finite either. The product is
//
//   y[r][o] = s[r] · Σ_g scale[o][g] · Σ_{i in g} (code[o][i] − zero[o][g]) · q[r][i]  + bias
//
// with exact integer sums over each 128 inputs or less, and f32 sums of these (class E2 against an fp64 product of the
// same integers). On the GPU the codes are equal, byte for byte, given the same rows (class E0).
#pragma once

#include <cstdint>
#include <span>

#include "core/views.h"
#include "formats/scheme.h"

namespace w4q::kernels {

/// Activation rows of a call from which on it counts as a prompt, whose products may take int8 activations.
inline constexpr int64_t least_int8_rows = 17;

/// Writes the codes of one row and returns its scale.
float quantize_int8(std::span<const float> x, std::span<int8_t> codes) noexcept;

/// Each row's scale into `scales`, its codes into `codes`, as floats.
void quantize_int8(MatrixView<const float> x, std::span<float> scales, MatrixView<float> codes);

/// Whether weights of such a scheme have products with int8 activations: integers of 4 and 8 bits with 16-bit scales,
/// groups of 32, 64, 128, … or a whole row.
bool takes_int8_activations(const formats::Scheme& scheme) noexcept;

}  // namespace w4q::kernels
