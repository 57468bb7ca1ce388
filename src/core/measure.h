// What there is to know of arrays of fp32, in one pass and with one result on every instruction set.
#pragma once

#include <cstdint>
#include <span>

namespace w4q {

/// Of two arrays of one length, in fp64. Sums are those of eight lanes, value i in lane i mod 8, and of these in turn.
/// Where a difference is not finite, neither is squared_error, and `largest` means nothing.
struct Difference {
  double squared = 0;        ///< Σ a²
  double squared_error = 0;  ///< Σ (a − b)²
  double largest = 0;        ///< max |a − b|
  int64_t changed = 0;       ///< how many differ; −0 is 0
};
Difference difference_of(std::span<const float> a, std::span<const float> b);

/// Of one array.
struct Magnitudes {
  float largest = 0, second = 0;  ///< the same if there are two of them; without meaning where one is not finite
  int64_t zeros = 0;
  bool finite = true;  ///< no NaN, no infinity
};
Magnitudes magnitudes_of(std::span<const float> values);

/// Whether all are at most `largest` in magnitude, which NaN is not.
bool all_within(std::span<const float> values, float largest);

}  // namespace w4q
