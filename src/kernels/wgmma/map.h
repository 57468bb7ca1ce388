// What the copy engine needs to know of an array to copy boxes of it to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

namespace w4q::kernels::wgmma {

struct Dimension {
  int64_t size;          ///< in elements
  int64_t stride_bytes;  ///< a multiple of 16; of the innermost: nothing
  int box;               ///< elements of a box, at most 256
};

/// A map of the array at `data`, aligned to 16, with 2 to 4 dimensions, the innermost first. Elements outside the array
/// are copied as zeros. `swizzled`: the 16-byte pieces of a box's rows, which are 128 bytes, are exchanged as
/// arrange.h says. Throws device where the driver refuses.
CUtensorMap map_boxes(const void* data, CUtensorMapDataType type, std::initializer_list<Dimension> dimensions,
                      bool swizzled = false);

}  // namespace w4q::kernels::wgmma
