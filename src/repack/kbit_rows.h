// What every layout of kbit weights needs beside its map.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/packed.h"

namespace w4q::repack {

/// LayoutRow::accepts of layouts that take kbit with blocks of 32 in any size.
bool accepts_kbit(const formats::Scheme& scheme, int64_t n, int64_t k, std::string* why);
/// The planes of the canonical layout. Throws unsupported for a scheme of another family.
std::vector<formats::PlaneSpec> canonical_planes(const formats::Scheme& scheme, int64_t n, int64_t k);

/// The codes of kbit-fragment, which other bit planes of 32 take too: their plane, and moving them to and from zeroed
/// canonical planes. Unpacking throws bad_file naming `name` when padding is not zero.
formats::PlaneSpec fragment_codes(int bits, int64_t n, int64_t k);
void pack_fragment_codes(const formats::PackedWeight& canonical, formats::PackedWeight& packed);
void unpack_fragment_codes(const formats::PackedWeight& packed, std::string_view name,
                           formats::PackedWeight& canonical);

/// A layout as its passes see it.
struct KbitLayout {
  std::string_view name;
  std::vector<formats::PlaneSpec> (*planes)(const formats::Scheme&, int64_t n, int64_t k);
};

/// Fills the codes and scales of `to`, which are zero, from those of `from`.
using MovePlanes = std::function<void(const formats::PackedWeight& from, formats::PackedWeight& to)>;

/// LayoutRow::pack and unpack but for moving codes and scales: checks what comes in, allocates what goes out, copies
/// the codebook. When unpacking, `move` is what refuses padding that is not zero.
formats::PackedWeight pack_kbit(const KbitLayout& layout, const formats::PackedWeight& canonical,
                                const MovePlanes& move);
formats::PackedWeight unpack_kbit(const KbitLayout& layout, const formats::PackedWeight& packed, std::string_view name,
                                  const MovePlanes& move);

}  // namespace w4q::repack
