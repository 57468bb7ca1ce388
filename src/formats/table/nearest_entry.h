// Which entry of a table is nearest to a value. A code is an index into the table, never a rank: entries stand in any
// order, and equal ones are told apart by the sign bit, so that −0 survives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace w4q::formats {

/// Where a value goes that lies in the middle between two entries.
enum class Ties {
  lower,  ///< to the lower entry; to the smaller magnitude in tables of sign and magnitude
  even,   ///< to the even code, as floats round
};

class NearestEntry {
 public:
  /// Entries are finite, at most 256. A table whose upper half is its lower half negated is one of sign and magnitude:
  /// the sign bit chooses the half, and the magnitude the entry.
  explicit NearestEntry(std::span<const float> table, Ties ties = Ties::lower);

  uint32_t operator()(float x) const noexcept;

 private:
  struct Entry {
    uint8_t positive, negative;  ///< the codes for values with and without a sign bit
  };
  uint32_t half_ = 0;  ///< what a negative value's code is larger by; 0 for tables that are searched as a whole
  std::vector<Entry> order_;
  std::vector<float> midpoints_;
};

}  // namespace w4q::formats
