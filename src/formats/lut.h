// bitsandbytes' 4-bit format: value = table[code] · scale, a table of 16 values that stands in the file, and a scale
// per block of the matrix taken flat, row after row, so that a block may run across row ends (docs/int.md).
//
// Canonical planes, B = ceil(n·k / block):
//   codes            I32 [ceil(n·k/8)]  a dense stream of 4-bit codes, low nibble first; unused top bits are zero
//   scales           F32 [B]            block maxima; or U8 [B] where they are nested
//   codebook         F32 [16]           in any order
//   nested_scales    F32 [ceil(B/256)]  nested only, like the rest:
//   nested_codebook  F32 [256]          scale of block b = nested_codebook[scales[b]] · nested_scales[b div 256]
//   nested_offset    F32 [1]                               + nested_offset, product and sum rounded to fp32
#pragma once

#include <array>

#include "formats/scheme_registry.h"

namespace w4q::formats {

inline constexpr int lut_bits = 4;
inline constexpr int lut_entries = 16;

/// bitsandbytes' two tables. NF4 ascends; of FP4's codes bit 3 is the sign, so it has two zeros.
const std::array<float, lut_entries>& nf4_table() noexcept;
const std::array<float, lut_entries>& fp4_table() noexcept;

/// Block sizes that the format has.
bool is_lut_block(int block) noexcept;

/// The registry row.
SchemeRow lut_row();

}  // namespace w4q::formats
