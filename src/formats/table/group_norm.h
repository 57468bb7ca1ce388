// Scales that are norms: what a table for N(0, 1) is multiplied by once a rotation has made a group nearly normal
// (rotated.h).
#pragma once

#include <cstdint>
#include <span>

namespace w4q::formats {

/// The largest magnitude of a codebook over that of normal_codebook: norms are divided by it. A table on any scale, or
/// one that carries a power of two, stands for the same levels.
double rotated_gain(std::span<const float> codebook, int bits) noexcept;

/// codebook / √group, each rounded once.
void rotated_levels(std::span<const float> codebook, int64_t group, std::span<float> levels) noexcept;

/// √(Σ v² · group / size), size values being given: 32 sums in double, of every 32nd value each, folded in halves, so
/// that a warp of a GPU gets the same bits.
double rotated_norm(std::span<const float> values, int64_t group) noexcept;

}  // namespace w4q::formats
