// What happens between the products: norms, rotation, gated activation, residual sums. All in fp32 and parallel over
// rows; the arithmetic follows the published definition step by step (class E2), and results do not depend on the
// number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "core/views.h"

namespace w4q::kernels {

/// RMSNorm of each row: y = w · (x · 1/√(mean(x²) + eps)). `weight` has x.cols values; y may be x.
void rms_norm(MatrixView<const float> x, std::span<const float> weight, float eps, MatrixView<float> y);

/// RMSNorm of each head of each row: rows hold cols / weight.size() heads side by side.
void rms_norm_heads(MatrixView<float> x, std::span<const float> weight, float eps);

/// The way back through either: `gradient` of a loss by the normed heads becomes that by x, which holds them before.
void rms_norm_gradient(MatrixView<const float> x, std::span<const float> weight, float eps, MatrixView<float> gradient);

/// And that by the norm's own weight w: sums[c] += Σ gradient · x̂ over rows and heads, before `gradient`, by the normed
/// heads, goes on as above. Does not depend on the number of threads.
void rms_norm_weight_gradient(MatrixView<const float> x, float eps, MatrixView<const float> gradient,
                              std::span<double> sums);

/// Rotates pairs (i, i + d/2), i < d/2, of each head of each row ("rotate half"), d = 2 · cosine.cols; channels from d
/// on stay. Row r of `cosine` and `sine` [rows × d/2] belongs to row r of x, whose heads are `head_dim` wide. Gradients
/// find back with −sine.
void rotate_heads(MatrixView<float> x, int64_t head_dim, MatrixView<const float> cosine, MatrixView<const float> sine);

/// The same of pairs (2i, 2i + 1).
void rotate_neighbours(MatrixView<float> x, int64_t head_dim, MatrixView<const float> cosine,
                       MatrixView<const float> sine);

/// gate = silu(gate) · up, silu(x) = x / (1 + e^−x).
void silu_multiply(MatrixView<float> gate, MatrixView<const float> up);

/// x += y.
void add_rows(MatrixView<float> x, MatrixView<const float> y);

}  // namespace w4q::kernels
