// The grid of kernels that give each thread one element: blocks of 256 threads.
#pragma once

#include <cstdint>

namespace w4q::device {

inline constexpr int element_threads = 256;

/// Blocks that hold a thread for each of `count` elements.
inline unsigned element_blocks(int64_t count) {
  return static_cast<unsigned>((count + element_threads - 1) / element_threads);
}

}  // namespace w4q::device
