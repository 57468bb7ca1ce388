#include "verify/weights/gains.h"

#include <algorithm>
#include <cmath>

#include "verify/weights/factors.h"

namespace w4q::verify {
namespace {

/// A line holds less than half of what rounding to nearest leaves of it, beyond four standard errors: sound weights hold 0.71
/// and more (limit.h), other inputs' nothing.
bool is_lost(const Factor& found, const Factor& rounded) {
  if (!(found.squares > 0) || found.values < 16) return false;
  return found.value() + 4 * found.error() < 0.5 * (rounded.value() - 4 * rounded.error());
}

/// Of blocks of one place, in all rows.
struct PlaceSpread {
  double squares = 0, chance = 0, count = 0;

  void add(const Factor& block, double usual) {
    if (!(block.squares > 0)) return;
    const double away = block.value() - usual, error = block.error();
    // Of blocks beside louder ones rounding may leave anything.
    if (error > 0.2) return;
    squares += away * away, chance += error * error, ++count;
  }
  double spread() const { return count < 16 ? 0 : std::sqrt(std::max(0.0, (squares - 1.5 * chance) / count)); }
};

class GainMeasure {
 public:
  GainMeasure(const HeldRows& held, size_t block)
      : held_(held), block_(block), columns_(held.width), rounded_columns_(held.width) {}

  Gains run() {
    for (size_t row = 0; row < held_.numbers.size(); ++row) look_at_row(row);
    for (size_t c = 0; c < held_.width; ++c) {
      if (result_.column >= 0 || !is_lost(columns_[c], rounded_columns_[c])) continue;
      result_.column = static_cast<int64_t>(c), result_.column_gain = columns_[c].value();
    }
    if (block_ > 1 && block_ < held_.width) look_at_blocks();
    return result_;
  }

 private:
  bool is_unsure(size_t c) const { return !held_.unsure.empty() && held_.unsure[c] != 0; }

  void look_at_row(size_t row) {
    Factor found, rounded;
    for (size_t c = 0; c < held_.width; ++c) {
      if (is_unsure(c)) continue;
      const size_t at = row * held_.width + c;
      for (Factor* sum : {&found, &columns_[c], &all_}) sum->add(double{held_.base[at]}, double{held_.found[at]});
      for (Factor* sum : {&rounded, &rounded_columns_[c]}) sum->add(double{held_.base[at]}, double{held_.rounded[at]});
    }
    if (result_.row >= 0 || !is_lost(found, rounded)) return;
    result_.row = held_.numbers[row], result_.row_gain = found.value();
  }

  void look_at_blocks() {
    for (size_t begin = 0; begin < held_.width; begin += block_) {
      PlaceSpread place;
      for (size_t row = 0; row < held_.numbers.size(); ++row) {
        Factor block;
        for (size_t c = begin; c < std::min(begin + block_, held_.width); ++c) {
          const size_t at = row * held_.width + c;
          if (!is_unsure(c)) block.add(double{held_.base[at]}, double{held_.found[at]});
        }
        place.add(block, all_.value());
      }
      if (place.spread() <= result_.spread) continue;
      result_.spread = place.spread(), result_.block = static_cast<int64_t>(begin / block_);
    }
  }

  const HeldRows& held_;
  size_t block_;
  std::vector<Factor> columns_, rounded_columns_;
  Factor all_;
  Gains result_;
};

}  // namespace

Gains gains_of(const HeldRows& rows, size_t block) { return GainMeasure(rows, block).run(); }

}  // namespace w4q::verify
