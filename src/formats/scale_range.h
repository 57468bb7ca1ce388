// All scales of a plane at once, wherever a layout put them.
#pragma once

#include "formats/packed.h"

namespace w4q::formats {

struct ScaleRange {
  float largest = 0;      ///< magnitude; infinite or NaN where one of them is
  bool negative = false;  ///< one has a sign bit
};

/// Of a plane of any type but nested. Reads every byte once, with all threads.
ScaleRange scale_range(const Plane& scales, ScaleType type);

}  // namespace w4q::formats
