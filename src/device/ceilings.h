// What a GPU's memory can do, measured in the same process as whatever is compared with it.
#pragma once

#include <cstdint>

#include "device/context.h"

namespace w4q::device {

struct Ceilings {
  double read = 0;   ///< bytes per second of a kernel that only reads
  double write = 0;  ///< … that only writes
  double copy = 0;   ///< … of a device-to-device copy, read and written bytes counted
};

/// Measures over buffers of `bytes` (at least 256 MB, so that the L2 cache plays no part).
Ceilings measure_ceilings(Context& context, int64_t bytes = int64_t{1} << 30);

/// Seconds that a kernel which only reads `bytes` takes, cold, in a graph of such kernels: the floor of any GEMV over
/// as many bytes of weights, launch and tail included.
double read_floor_seconds(Context& context, int64_t bytes);

}  // namespace w4q::device
