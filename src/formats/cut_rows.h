// Some outputs of a packed weight as a weight by themselves.
#pragma once

#include "formats/packed.h"

namespace w4q::formats {

/// Rows [first, first + rows) of a weight in the canonical layout; `specs` are the planes of so many rows. Throws
/// unsupported naming `name` where a plane is not made of rows: blocks of several outputs that the cut divides.
PackedWeight cut_rows(const PackedWeight& weight, int64_t first, int64_t rows, std::span<const PlaneSpec> specs,
                      std::string_view name);

}  // namespace w4q::formats
