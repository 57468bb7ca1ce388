// rotated: codes of 2 to 5 bits into a table for N(0, 1), one norm for each group of d weights along k. What it holds
// are weights of a rotated input (rotation.h): a rotation makes the weights of a group nearly normal, so that their
// norm says all about them and one table serves every group (docs/rotated.md).
//
//     w = level[code] · norm        level = fp32(codebook / √d)
//
// Canonical planes: codes I32 [n, ceil(k/32), bits], bit planes of 32 weights as in kbit; scales F16, U8 (E4M4) or F32
// [n, ceil(k/d)]; codebook F32 [2^bits]. d is a power of two from 32 on, or the whole row. The last group of a row may
// be ragged: its norm is stored as √d times the root of its mean square, which a whole group's is too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/scheme_registry.h"

namespace w4q::formats {

/// Weights that share a norm in a row of k: the scheme's block, or k.
inline int64_t rotated_group(const Scheme& scheme, int64_t k) noexcept {
  return scheme.block == whole_row ? k : scheme.block;
}
inline int64_t rotated_groups(const Scheme& scheme, int64_t k) noexcept {
  const int64_t group = rotated_group(scheme, k);
  return (k + group - 1) / group;
}

/// The Lloyd–Max quantizer of N(0, 1) with 2^bits levels, bits 2 … 5: what the family's codebook is unless told
/// otherwise.
std::span<const float> normal_codebook(int bits) noexcept;

/// The largest magnitude of a codebook over that of normal_codebook: norms are divided by it. A table on any scale, or
/// one that carries a power of two, stands for the same levels.
double rotated_gain(std::span<const float> codebook, int bits) noexcept;

/// codebook / √group, each rounded once.
void rotated_levels(std::span<const float> codebook, int64_t group, std::span<float> levels) noexcept;

/// √(Σ v² · group / size), size values being given: 32 sums in double, of every 32nd value each, folded in halves, so
/// that a warp of a GPU gets the same bits.
double rotated_norm(std::span<const float> values, int64_t group) noexcept;

/// The largest norm of a type, and its smallest normal one.
float rotated_scale_max(ScaleType type) noexcept;
float rotated_scale_min_normal(ScaleType type) noexcept;

/// A norm as its type stores it.
struct StoredNorm {
  uint32_t bits = 0;
  float value = 0;
  bool saturated = false;
};
StoredNorm rotated_store_norm(double norm, ScaleType type) noexcept;
/// Norm `index` of a plane of scales.
float rotated_norm_at(const Plane& scales, size_t index) noexcept;
void rotated_put_norm(Plane& scales, size_t index, const StoredNorm& norm) noexcept;

/// The kbit weight that decodes to the same numbers, bit for bit: the levels as its table, a group's norm as the scale
/// of each block of 32 in it. For kernels and layouts of kbit. Throws unsupported for f32 norms, which kbit has not.
PackedWeight rotated_as_kbit(const PackedWeight& canonical);

/// The registry row.
SchemeRow rotated_row();

}  // namespace w4q::formats
