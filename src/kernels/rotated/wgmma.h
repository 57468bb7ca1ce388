// Warpgroup products of rotated weights on sm_90a (kernels/wgmma).
#pragma once

#include <string_view>

#include "device/stream.h"

namespace w4q::kernels::rotated {

struct RotatedLaunch;

/// Codes of kbit-fragment and norms of groups, one pass or two of equal widths (3 or 4 bits) whose groups are both of
/// 32 inputs or both of more. `launch` with inputs that are to be made; `arranged` has wgmma::tile_rows(m) rows for
/// each rotation, aligned to 256. Needs wgmma::built() and an sm_90.
void launch_wgmma(const RotatedLaunch& launch, int bits, void* arranged, const device::Stream& stream,
                  std::string_view shape);

}  // namespace w4q::kernels::rotated
