// What every kernel knows about warps.
#pragma once

namespace w4q::device {

inline constexpr int warp_lanes = 32;
inline constexpr unsigned all_lanes = 0xFFFFFFFFu;

}  // namespace w4q::device
