// Which of several sizes each tensor gets, when all of them together may have so many bytes: a knapsack with one choice
// of every item, solved exactly (docs/quality.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace w4q::quantize {

/// One way to store an item, and what it costs the model.
struct AllocationChoice {
  int64_t bytes = 0;
  double cost = 0;  ///< finite, at least 0; costs of items add up
};

/// The least total cost for every total size.
class AllocationFrontier {
 public:
  /// One list of choices for each item. Sizes are counted in their greatest common divisor; where the table of
  /// items × sizes would pass `most_cells`, in a multiple of it that fits, every size rounded up, and the frontier is
  /// exact for the rounded sizes. Throws internal for an item without choices, a size or a cost that is none.
  explicit AllocationFrontier(std::vector<std::vector<AllocationChoice>> items, int64_t most_cells = int64_t{1} << 28);

  struct Point {
    int64_t bytes = 0;  ///< of the choices themselves, not rounded
    double cost = 0;
  };

  /// Bytes of the smallest choices.
  int64_t smallest() const noexcept { return smallest_; }
  /// The choice of each item, by index, with the least total cost among those of at most `bytes`; ties go to the
  /// smaller size. Empty when even the smallest choices are larger.
  std::vector<size_t> choose(int64_t bytes) const;
  /// Size and cost of choices.
  Point point(const std::vector<size_t>& choices) const;

 private:
  std::vector<std::vector<AllocationChoice>> items_;
  std::vector<std::vector<int64_t>> steps_;  // of each choice above the item's smallest one, in units
  std::vector<uint8_t> taken_;               // [item][size]: the choice that the least cost of this size ends with
  std::vector<double> cost_;                 // [size] of all items, exactly this size
  int64_t smallest_ = 0;
  int64_t unit_ = 1;
};

}  // namespace w4q::quantize
