// Planes of two weights in GPU memory whose rows take turns (turn_rows.h), with the bytes of packing their stacked
// canonical rows (class E0). Read once and written once; one launch.
#pragma once

#include <cstdint>
#include <string_view>

#include "device/stream.h"
#include "formats/packed.h"
#include "repack/turn_rows.h"

namespace w4q::repack {

/// A plane of each weight and of both, aligned to 16 bytes.
struct TurnedPlanes {
  const void* first = nullptr;
  const void* second = nullptr;
  void* both = nullptr;
};

/// Queues the plane `role`, codes, scales or zeros, of two weights of n × k in `layout` → that of one of 2·n × k. n and
/// k are multiples of 64. Throws unsupported for a layout or a scheme that has no such pass, bad_argument for sizes.
void turn_rows_cuda(std::string_view layout, const formats::Scheme& scheme, formats::PlaneRole role, int64_t n,
                    int64_t k, const TurnedPlanes& planes, const device::Stream& stream);

}  // namespace w4q::repack
