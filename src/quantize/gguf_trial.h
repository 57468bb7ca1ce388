// What the search for scales of GGUF blocks tries, for gguf_panel.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace w4q::quantize {

/// Where the ends of a part's range lie: so many steps below the lowest level and above the highest one.
struct GgufEnds {
  float below = 0, above = 0;
};

struct GgufTrial {
  std::array<float, 16> levels{}, midpoints{};  ///< of a table
  size_t count = 0;                             ///< levels
  float lowest = 0, highest = 0;                ///< of them
  float extreme_scale = 1;                      ///< of the part with the largest step
  float highest_minimum = 1;                    ///< of the part with the largest offset
  std::vector<GgufEnds> ends;                   ///< with offsets
  std::vector<float> reaches;  ///< without: the level, a real number, that the largest magnitude becomes
  std::vector<float> starts;   ///< factors of the first unit
  int rounds = 4;              ///< of parts and units in turn
};

}  // namespace w4q::quantize
