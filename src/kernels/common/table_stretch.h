// Codebooks on tensor cores: entries become f16, or their products with scales do, and a factor on all of them, taken
// out of fp32 sums again, decides how much that costs. Normal-float tables of 8 entries lose 28 times less than as they
// are, those of 16 and 32 twice less; products with E4M4 scales 2.0 (8 entries) and 1.3 times less.
#pragma once

#include <span>

namespace w4q::kernels {

/// The factor, of 1024 from 1 up to 2, with which the entries' mean square of roundings to f16, over the factor, is
/// least. 1 where a table is exact as it is. Entries are finite.
float table_stretch(std::span<const float> table);

/// The same of 64 factors and the products of entries, rounded, with the sixteen mantissas of E4M4: factors of few bits
/// leave products few.
float product_stretch(std::span<const float> table);

/// What kernels multiply a table with: the stretch times the power of two that puts `largest` of its magnitudes, so
/// stretched, between 2^top and 2^(top + 1).
float table_factor(float largest, float stretch, int top) noexcept;

}  // namespace w4q::kernels
