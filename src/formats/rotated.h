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

#include "formats/codebook.h"
#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"
#include "formats/table/group_norm.h"

namespace w4q::formats {

/// Weights that share a norm in a row of k: the scheme's block, or k.
inline int64_t rotated_group(const Scheme& scheme, int64_t k) noexcept {
  return scheme.block == whole_row ? k : scheme.block;
}
inline int64_t rotated_groups(const Scheme& scheme, int64_t k) noexcept {
  const int64_t group = rotated_group(scheme, k);
  return (k + group - 1) / group;
}

/// A norm, divided by rotated_gain, as a type stores it.
inline StoredScale rotated_scale(double norm, ScaleType type) noexcept {
  return store_scale(norm, type, scale_codec(type).largest);
}

/// The registry row.
SchemeRow rotated_row();

}  // namespace w4q::formats
