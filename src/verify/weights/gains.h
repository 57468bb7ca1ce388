// How much of each row and column of the base's weight a packed one still holds: ⟨w, ŵ⟩ / ⟨w, w⟩. Whoever rounds, searches or
// feeds errors back leaves that near one, since what he adds has nothing to do with w; codes of other inputs leave nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "verify/weights/factors.h"

namespace w4q::verify {

struct Gains {
  int64_t row = -1, column = -1;         ///< the first that is not the base's; −1: all are
  double row_gain = 1, column_gain = 1;  ///< of these
  /// The column holds the base's with another sign or more than twice, which no way of rounding makes of one.
  bool column_is_wild = false;
};

/// Rows of `width` values each: the base's in the candidate's units, what is stored, and the base's rounded to nearest.
struct HeldRows {
  std::span<const float> base, found, rounded;
  size_t width = 0;
  int bits = 0;
  std::vector<int64_t> numbers = {};  ///< of the rows
  std::vector<uint8_t> unsure = {};   ///< 1: nothing is known of this column; empty: of all is
  double least = least_gain;          ///< Moves::least_of_line
};

Gains gains_of(const HeldRows& rows);

}  // namespace w4q::verify
