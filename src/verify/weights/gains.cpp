#include "verify/weights/gains.h"

#include <algorithm>
#include <cmath>

#include "verify/weights/factors.h"

namespace w4q::verify {
namespace {

/// A row or a column: what is stored of it and what rounding to nearest makes of it.
struct HeldLine {
  Factor found, rounded;
  double fourths = 0;

  void add(double base, double stored, double nearest) {
    found.add(base, stored), rounded.add(base, nearest), fourths += std::pow(base, 4);
  }
  /// Where few values make up a line, or rounding leaves little of it, one that falls to the next code is a large part of it.
  bool is_known() const {
    constexpr double fewest_values = 8, well_rounded = 0.75;
    return fourths > 0 && found.squares * found.squares > fewest_values * fourths && rounded.explained() > well_rounded;
  }
  /// It holds less than half, or more than 1.6 times, of what rounding to nearest leaves of it, five standard errors away from
  /// that: sound weights hold 0.71 to 1.06 (limit.h), other inputs' nothing.
  bool is_lost() const {
    constexpr double errors = 5, least = 0.5, most = 1.6;
    if (!is_known()) return false;
    const double is = found.value(), usual = rounded.value();
    return (is < least * usual || is > most * usual) && std::abs(is - usual) > errors * found.error();
  }
};

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
      : held_(held), block_(block), columns_(held.width), rows_(held.numbers.size()) {}

  Gains run() {
    for (size_t row = 0; row < held_.numbers.size(); ++row) add_row(row);
    if (const HeldLine* row = first_lost(rows_)) {
      result_.row = held_.numbers[static_cast<size_t>(row - rows_.data())], result_.row_gain = row->found.value();
    }
    if (const HeldLine* column = first_lost(columns_)) {
      result_.column = column - columns_.data(), result_.column_gain = column->found.value();
    }
    if (all_.squares > 0 && rounded_.value() > 0) result_.all = all_.value() / rounded_.value();
    look_at_rows();
    if (block_ > 1 && block_ < held_.width) look_at_blocks();
    return result_;
  }

 private:
  bool is_unsure(size_t c) const { return !held_.unsure.empty() && held_.unsure[c] != 0; }

  void add_row(size_t row) {
    HeldLine& line = rows_[row];
    for (size_t c = 0; c < held_.width; ++c) {
      const size_t at = row * held_.width + c;
      energy_ += std::pow(double{held_.base[at]}, 2);
      if (is_unsure(c)) continue;
      const double base = held_.base[at], found = held_.found[at], rounded = held_.rounded[at];
      line.add(base, found, rounded), columns_[c].add(base, found, rounded);
      all_.add(base, found), rounded_.add(base, rounded);
    }
  }

  /// Scales of a hundredth of a weight's others are beyond what some types of scales hold: these lines are left out.
  const HeldLine* first_lost(const std::vector<HeldLine>& lines) const {
    constexpr double least_energy = 1e-4;
    const auto found = std::ranges::find_if(lines, [&](const HeldLine& line) {
      return line.found.squares * static_cast<double>(lines.size()) > least_energy * energy_ && line.is_lost();
    });
    return found == lines.end() ? nullptr : &*found;
  }

  void look_at_rows() {
    constexpr double surely_away = 5, fewest_values = 32;
    PlaceSpread place;
    for (size_t row = 0; row < rows_.size(); ++row) {
      const Factor& held = rows_[row].found;
      if (!rows_[row].is_known()) continue;
      place.add(held, all_.value());
      // As many values as a line's energy is spread over.
      const double values = held.squares * held.squares / rows_[row].fourths;
      const double error = held.error() * std::sqrt(static_cast<double>(held.values) / values);
      if (values < fewest_values) continue;
      const double away = std::abs(held.value() - all_.value()) - surely_away * error;
      if (away > result_.away) result_.away = away, result_.away_row = held_.numbers[row];
    }
    result_.spread = place.spread();
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
  std::vector<HeldLine> columns_, rows_;
  Factor all_, rounded_;
  double energy_ = 0;
  Gains result_;
};

}  // namespace

Gains gains_of(const HeldRows& rows, size_t block) { return GainMeasure(rows, block).run(); }

}  // namespace w4q::verify
