// Blocks of GGUF whose values lie on a grid of their type already: what a file of that type decodes to.
#pragma once

#include <optional>
#include <span>

#include "formats/gguf_forms.h"

namespace w4q::quantize {

/// Whether the first part of a block, form.part of its values, is on such a grid by itself: said in next to no time of most
/// weights that are not.
bool may_be_exact(const formats::GgufForm& form, std::span<const float> first_part);

/// Scales under which a block decodes to `values` [form.block], finite, bit for bit, with the nearest levels; nothing where
/// there are none, or where sums of steps and offsets were rounded. Of several ways to say the same, one that searched
/// scales would have taken: the largest integers, levels that fill their range, the largest step with a negative scale where
/// scales have signs. For types whose scales nest.
std::optional<formats::GgufScales> exact_gguf_scales(const formats::GgufForm& form, std::span<const float> values);

/// Of a block with signed scales that says its values in one of several ways, the way that exact_gguf_scales() would:
/// what a reader of its values would write. Others stay as they are. No value changes but the sign of zeros.
void settle_gguf_block(const formats::GgufForm& form, formats::GgufScales& scales, std::span<uint8_t> levels);

}  // namespace w4q::quantize
