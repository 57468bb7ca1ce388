// Codes held one by one against the base: whoever rounds takes the nearest under the scale and the table that are
// stored, whatever made these (docs/verify.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/packed.h"
#include "formats/table/table_format.h"

namespace w4q::verify {

class NearestCodes {
 public:
  /// A canonical weight that passed validation, and outlives this.
  /// `folded`: what it is asked for carries scales that are known to the rounding of a norm, or measured.
  NearestCodes(const formats::PackedWeight& canonical, bool folded);

  /// Calls `off(col)` for every input of row `row` whose code is not the nearest to values[col] (in the units that this
  /// pass rounds) by more than what rounding of scales can make of a tie.
  template <class Off>
  void look_at(int64_t row, std::span<const float> values, const Off& off) {
    read(row);
    for (size_t col = 0; col < values.size(); ++col) {
      if (is_off(col, values[col])) off(static_cast<int64_t>(col));
    }
  }

 private:
  void read(int64_t row);
  bool is_off(size_t col, float value) const;

  const formats::PackedWeight& weight_;
  bool integer_;
  bool folded_;
  bool readable_ = true;
  formats::TableFormat format_;
  std::vector<float> levels_;         // of a table
  std::vector<float> below_, above_;  // half the distance to the next level, of each
  std::vector<uint8_t> codes_;        // [k]
  std::vector<float> scales_;         // [k]
  std::vector<int> zeros_;            // [k]
};

}  // namespace w4q::verify
