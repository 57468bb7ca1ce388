#include "verify/weights/gains.h"

#include <algorithm>
#include <cmath>

namespace w4q::verify {
namespace {

/// A row or a column: what is stored of it and what rounding to nearest makes of it.
struct HeldLine {
  Factor found, rounded;

  void add(double base, double stored, double nearest) { found.add(base, stored), rounded.add(base, nearest); }
  /// Where few values make up a line, or rounding leaves little of it, one that falls to the next code is a large part of it.
  bool is_known() const {
    constexpr double fewest_values = 8, well_rounded = 0.75;
    return found.weighed_squares > 0 && found.squares * found.squares > fewest_values * found.weighed_squares &&
           rounded.explained() > well_rounded;
  }
  /// By itself and beside what rounding to nearest leaves of it.
  bool is_lost(double most, double least) const {
    return is_known() && found.is_lost(1, most, least) && found.is_lost(rounded.value(), most, least);
  }
  /// Of the lost ones those that nobody has given up.
  bool is_wild(double most, double least) const {
    constexpr double twice = 2;  // rounding may shrink what a column holds, and feeding errors back make up for it
    return is_lost(most, least) && (found.value() < -least_gain || found.value() > twice);
  }
};

/// Whether rows are nearly multiples of each other: then what rounding leaves of a line is the same in all of them, and no
/// chance.
bool is_of_low_rank(std::span<const float> values, size_t width) {
  constexpr double most_in_common = 0.25;
  const size_t rows = values.size() / width;
  double common = 0;
  for (size_t row = 0; row + 1 < rows; ++row) {
    double product = 0, one = 0, other = 0;
    for (size_t c = 0; c < width; ++c) {
      const double a = values[row * width + c], b = values[(row + 1) * width + c];
      product += a * b, one += a * a, other += b * b;
    }
    if (one > 0 && other > 0) common += product * product / (one * other);
  }
  return common > most_in_common * static_cast<double>(rows);
}

class GainMeasure {
 public:
  explicit GainMeasure(const HeldRows& held) : held_(held), columns_(held.width), rows_(held.numbers.size()) {}

  Gains run() {
    if (is_of_low_rank(held_.base, held_.width)) return result_;
    for (size_t row = 0; row < held_.numbers.size(); ++row) add_row(row);
    if (const HeldLine* row = first_of(rows_, &HeldLine::is_lost)) {
      result_.row = held_.numbers[static_cast<size_t>(row - rows_.data())], result_.row_gain = row->found.value();
    }
    const HeldLine* column = first_of(columns_, &HeldLine::is_wild);
    result_.column_is_wild = column != nullptr;
    if (column == nullptr) column = first_of(columns_, &HeldLine::is_lost);
    if (column != nullptr) result_.column = column - columns_.data(), result_.column_gain = column->found.value();
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
    }
  }

  /// Scales of a hundredth of a weight's others are beyond what some types of scales hold: these lines are left out.
  const HeldLine* first_of(const std::vector<HeldLine>& lines, bool (HeldLine::*is)(double, double) const) const {
    constexpr double least_energy = 1e-4;
    const double most = held_.bits > 2 ? most_gain : most_gain_of_two_bits;
    const auto found = std::ranges::find_if(lines, [&](const HeldLine& line) {
      return line.found.squares * static_cast<double>(lines.size()) > least_energy * energy_ &&
             (line.*is)(most, held_.least);
    });
    return found == lines.end() ? nullptr : &*found;
  }

  const HeldRows& held_;
  std::vector<HeldLine> columns_, rows_;
  double energy_ = 0;
  Gains result_;
};

}  // namespace

Gains gains_of(const HeldRows& rows) { return GainMeasure(rows).run(); }

}  // namespace w4q::verify
