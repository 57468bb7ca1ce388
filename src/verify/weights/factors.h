// What rows and columns of a stored weight are multiplied by beside the base's, by least squares.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/linear/linear.h"

namespace w4q::verify {

/// Rows that are decoded together.
inline constexpr int64_t decoded_rows = 16;

/// ⟨w, ŵ⟩ / ⟨w, w⟩ over that of rounding to nearest: sound weights neither shrink nor grow by more. Measured: 0.71 to 1.06.
inline constexpr double least_gain = 0.5, most_gain = 1.6;

/// Of sums over a row or a column: what the base's is multiplied by to come nearest to the stored one, and its standard
/// error.
struct Factor {
  double products = 0, squares = 0, found = 0;
  int64_t values = 0;

  void add(double base, double stored) noexcept {
    products += base * stored, squares += base * base, found += stored * stored, ++values;
  }
  void add(const Factor& other) noexcept {
    products += other.products, squares += other.squares, found += other.found, values += other.values;
  }
  double value() const noexcept { return products / squares; }
  double error() const noexcept {
    const double rest = std::max(0.0, found - products * products / squares);
    return std::sqrt(rest / squares / static_cast<double>(values));
  }
  /// That it is beyond these bounds beside what is usual, and five standard errors away from it: other inputs' codes leave
  /// nothing.
  bool is_lost(double usual = 1) const {
    constexpr double errors = 5;
    const double is = value();
    return (is < least_gain * usual || is > most_gain * usual) && std::abs(is - usual) > errors * error();
  }
  /// The share of what is stored that the base's explains.
  double explained() const noexcept {
    return squares > 0 && found > 0 && products > 0 ? products * products / squares / found : 0;
  }
};

/// Of each row, behind the factors of its columns.
std::vector<Factor> row_factors_of(const kernels::LinearWeight& base, const kernels::LinearWeight& stored,
                                   const std::vector<float>& columns);

/// Of each column, over up to 256 rows, behind the factors of rows; empty: these are as they were.
std::vector<Factor> column_factors(const kernels::LinearWeight& base, const kernels::LinearWeight& stored,
                                   const std::vector<float>& rows = {});

}  // namespace w4q::verify
