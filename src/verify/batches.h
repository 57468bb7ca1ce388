// Work over many packed weights side by side, few enough at once that memory stays bounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "checkpoint/packed_checkpoint.h"
#include "core/parallel.h"

namespace w4q::verify {

/// Of planes, which are held until a linear has been looked at.
inline constexpr int64_t bytes_together = int64_t{128} << 20;

inline int64_t plane_bytes(const checkpoint::PackedLinearInfo& info) {
  int64_t bytes = 0;
  for (const auto& plane : checkpoint::planned_planes(info)) {
    bytes += element_count(plane.shape) * dtype_bits(plane.dtype) / 8;
  }
  return bytes;
}

/// Calls `look(i)` for each linear on any thread, for as many at once as hold bytes_together, and then `tell(i)` for these
/// in order on the caller. A linear alone has all threads for the loops within.
inline void in_batches(std::span<const checkpoint::PackedLinearInfo* const> linears,
                       const std::function<void(size_t)>& look, const std::function<void(size_t)>& tell) {
  for (size_t first = 0; first < linears.size();) {
    size_t last = first + 1;
    int64_t bytes = plane_bytes(*linears[first]);
    while (last < linears.size() && bytes + plane_bytes(*linears[last]) <= bytes_together) {
      bytes += plane_bytes(*linears[last++]);
    }
    parallel_for(static_cast<int64_t>(last - first), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) look(first + static_cast<size_t>(i));
    });
    for (; first < last; ++first) tell(first);
  }
}

}  // namespace w4q::verify
