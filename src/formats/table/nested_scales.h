// Nested scales, bitsandbytes' "double quantization": scale of block b, products and sum rounded to fp32, is
//
//     nested_codebook[scales[b]] · nested_scales[b div 256] + nested_offset
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/packed.h"

namespace w4q::formats {

inline constexpr int nested_block = 256;
inline constexpr int nested_entries = 256;

/// The table of nested scales. Other programs' differ from it in last places: use the one that stands in the file.
std::vector<float> nested_table();
/// Adds the planes nested_scales F32 [ceil(blocks/256)], nested_codebook F32 [256] and nested_offset F32 [1].
void add_nested_planes(int64_t blocks, std::vector<PlaneSpec>& specs);
/// The scale of block `index`.
float nested_scale(const PackedWeight& canonical, int64_t index) noexcept;
/// Stores the maxima of all blocks: the mean is the offset; what is left is divided by its largest magnitude over 256
/// blocks and rounded to the nearest entry of the table.
void store_nested(std::span<const float> maxima, PackedWeight& weight);

}  // namespace w4q::formats
