// What every layout of kbit weights needs beside its map.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/packed.h"

namespace w4q::repack {

/// LayoutRow::accepts of layouts that take kbit with blocks of 32 in any size.
bool accepts_kbit(const formats::Scheme& scheme, int64_t n, int64_t k, std::string* why);
/// The planes of the canonical layout. Throws unsupported for a scheme of another family.
std::vector<formats::PlaneSpec> canonical_planes(const formats::Scheme& scheme, int64_t n, int64_t k);
/// The codebook is the same in every layout.
void copy_codebook(const formats::PackedWeight& from, formats::PackedWeight& to);

}  // namespace w4q::repack
