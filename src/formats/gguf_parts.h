// Blocks of GGUF taken apart: of any bytes, what store_gguf_block (gguf_forms.h) would put together again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "formats/gguf_forms.h"

namespace w4q::formats {

/// One block of a type that is no lattice: `bytes` is one block, `levels` gets form.block indices of levels, ascending.
/// A weight is d · scale · level − d_minimum · minimum (gguf_forms.h); where a type stores no scales or minimums these are
/// 1. MXFP4's two zeros are one level.
GgufScales read_gguf_block(const GgufForm& form, std::span<const std::byte> bytes, std::span<uint8_t> levels);

}  // namespace w4q::formats
