// Warpgroup products of trellises on sm_90a (kernels/wgmma).
#pragma once

#include <string_view>

#include "device/stream.h"
#include "formats/scheme.h"

namespace w4q::kernels::trellis {

struct TrellisLaunch;

/// trellis-fragment of 2 to 4 bits; `launch` with inputs that are to be made. `arranged` has wgmma::tile_rows(m) rows,
/// aligned to 256. Needs wgmma::built() and an sm_90.
void launch_wgmma(const TrellisLaunch& launch, const formats::Scheme& scheme, void* arranged,
                  const device::Stream& stream, std::string_view shape);

}  // namespace w4q::kernels::trellis
