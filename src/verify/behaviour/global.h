// Other readings of config.json.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "verify/behaviour/passage.h"

namespace w4q::verify::behaviour {

/// A whole model read otherwise.
struct GlobalReading {
  std::string what;  ///< "config.json: rope_theta 10000"
  Reader reader;
  std::vector<int32_t> ids;
};

/// Calls `take` with each.
void for_each_global_reading(const Reader& reader, std::span<const int32_t> ids,
                             const std::function<void(const GlobalReading& reading)>& take);

}  // namespace w4q::verify::behaviour
