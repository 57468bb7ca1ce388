// How much of each row, column and block of the base's weight a packed one still holds: ⟨w, ŵ⟩ / ⟨w, w⟩. Whoever rounds, searches
// or feeds errors back leaves that near one, since what he adds has nothing to do with w; codes of other inputs leave nothing,
// other scales their ratio.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace w4q::verify {

struct Gains {
  int64_t row = -1, column = -1;         ///< the first that is not the base's; −1: all are
  double row_gain = 1, column_gain = 1;  ///< of these
  /// How far blocks of one place differ from the weight's, beyond chance: a deviation, of the worst place, which are the
  /// columns from block · width on; −1: whole rows.
  double spread = 0;
  int64_t block = -1;
  double away = 0;  ///< how far the row that differs most does so, beyond five standard errors
  int64_t away_row = -1;
  double all = 1;  ///< of the whole weight, over that of rounding to nearest
};

/// Rows of `width` values each: the base's in the candidate's units, what is stored, and the base's rounded to nearest.
struct HeldRows {
  std::span<const float> base, found, rounded;
  size_t width = 0;
  std::vector<int64_t> numbers = {};  ///< of the rows
  std::vector<uint8_t> unsure = {};   ///< 1: nothing is known of this column; empty: of all is
};

/// `block`: inputs that share a scale; 0: they are not together.
Gains gains_of(const HeldRows& rows, size_t block);

}  // namespace w4q::verify
