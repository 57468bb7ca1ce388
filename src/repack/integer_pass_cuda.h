// The passes of the integer layouts on the GPU: canonical ↔ the layout, with the bytes of the CPU passes (class E0).
#pragma once

#include "device/context.h"
#include "formats/packed.h"

namespace w4q::repack {

/// Moves codes, scales and zeros of `from` into the planes of `to`, one of which is canonical, the other in the layout
/// of `map`. Planes travel through GPU memory, where all of both weights must fit; group indices are not touched.
/// Padding of a packed `to` is zero. Instantiated for the maps of the registry. Throws device when the GPU fails.
template <class Map>
void move_integer_on_gpu(const Map& map, const formats::PackedWeight& from, formats::PackedWeight& to,
                         device::Context& gpu);

}  // namespace w4q::repack
