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
/// The same of a row or a column, of which two bits may leave more. Measured: 1.85, weights of low rank.
inline constexpr double most_gain_of_two_bits = 2.2;

/// What a weight may have been moved by before it was rounded, where config.json says that its layers make up for those
/// before them (docs/quality.md): of the energy of each row, of which a fifth may be lost. Of less than 4 bits rounding
/// leaves less of such a row, and a column that its inputs say little by may be given up in part: measured, of random
/// weights and 512 tokens, 0.36 with 2 and 3 bits. The whole of it must hold as much as any other weight.
struct Moves {
  double energy = 0;
  double least_of_line = least_gain;  ///< that a row or a column holds
};
Moves moves_of(int bits) noexcept;

/// Of sums over a row or a column: what the base's is multiplied by to come nearest to the stored one, and its standard
/// error.
struct Factor {
  double products = 0, squares = 0, found = 0;       ///< Σ wŵ, Σ w², Σ ŵ²
  double weighed_squares = 0, weighed_products = 0;  ///< Σ w⁴, Σ w³ŵ
  double weighed_found = 0;                          ///< Σ w²ŵ²
  int64_t values = 0;

  void add(double base, double stored) noexcept {
    const double square = base * base, product = base * stored;
    products += product, squares += square, found += stored * stored, ++values;
    weighed_squares += square * square, weighed_products += square * product, weighed_found += product * product;
  }
  void add(const Factor& other) noexcept {
    products += other.products, squares += other.squares, found += other.found, values += other.values;
    weighed_squares += other.weighed_squares, weighed_products += other.weighed_products;
    weighed_found += other.weighed_found;
  }
  double value() const noexcept { return products / squares; }
  /// The larger of two: as if what is missed were spread evenly, and as it is, for it may be largest where the values are.
  double error() const noexcept {
    const double is = value(), rest = std::max(0.0, found - products * is);
    const double weighed_rest = std::max(0.0, weighed_found - 2 * is * weighed_products + is * is * weighed_squares);
    return std::max(std::sqrt(rest / squares / static_cast<double>(values)), std::sqrt(weighed_rest) / squares);
  }
  /// Values that are nearly all of one size are all rounded alike: what is missed says nothing of how well the factor is known.
  bool of_one_size() const noexcept {
    constexpr double most_kurtosis = 1.5;  // of uniform values 1.8
    return weighed_squares * static_cast<double>(values) < most_kurtosis * squares * squares;
  }
  /// That it is beyond these bounds beside what is usual, and five standard errors away from it: other inputs' codes leave
  /// nothing.
  bool is_lost(double usual = 1, double most = most_gain, double least = least_gain) const {
    constexpr double errors = 5;
    const double is = value();
    return (is < least * usual || is > most * usual) && std::abs(is - usual) > errors * error();
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
