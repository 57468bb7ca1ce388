// A sample of the codes, scales and zero points of an integer weight, and ways of reading it that conventions confuse.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "formats/packed.h"

namespace w4q::verify {

/// Where a code of eight neighbours stands: entry i is the neighbour that is read in place of neighbour i.
using Order = std::array<uint8_t, 8>;
inline constexpr Order plain_order{0, 1, 2, 3, 4, 5, 6, 7};

/// Another way of reading the same numbers.
struct Reading {
  std::string_view name;  ///< what is wrong if this one fits: "nibbles stand in plain order"
  Order rows = plain_order;
  Order cols = plain_order;
  int zero = 0;  ///< added to every zero point
  bool transposed_scales = false;
};

/// How far one series follows another.
struct Slope {
  double value = 0;
  double error = 0;  ///< its standard error
};

/// Covariance of two series of one length over the variance of the first; zeros where that has none.
Slope slope(std::span<const double> x, std::span<const double> y);

/// The standard error of `found` where what is left of values in one place, `places` of them, goes together. 0 where that
/// is not known.
double error_by_place(std::span<const double> x, std::span<const double> y, std::span<const size_t> place,
                      const Slope& found, size_t places);

/// How far decoded weights lie to one side of nothing, in steps.
struct Lean {
  double value = 0;
  double error = 0;  ///< its standard error
};

class WeightSample {
 public:
  /// `canonical` is an integer weight that outlives the sample. Takes blocks of eight rows, at most 512 rows, evenly.
  explicit WeightSample(const formats::PackedWeight& canonical);

  int64_t size() const noexcept { return static_cast<int64_t>(rows_.size()); }
  int64_t row(int64_t i) const noexcept { return rows_[static_cast<size_t>(i)]; }
  int64_t groups() const noexcept { return groups_; }
  /// Whether the reading exists for this size: eights of rows or columns, more than one group.
  bool can_read(const Reading& reading) const noexcept;

  /// Mean over the sample's groups of code − zero: a matrix of weights has a mean close to nothing.
  Lean lean() const;
  /// Mean square of (mean code − zero − lean) over groups: small where zero points belong to their codes.
  double zero_mismatch(const Reading& reading) const;
  /// How far a group's scale follows from its codes: the slope of −log scale over log (deviation of the codes). A group
  /// with an outlier has a large scale and codes of small deviation; scales of other groups know nothing of it.
  /// About 1 where scales belong to their codes, about 0 where not, give or take its error.
  Slope scale_match(const Reading& reading) const;
  /// Sum of squares of every column, as decoded.
  std::vector<double> column_energy() const;

  /// Weights of sample row `i` by this reading.
  void decode(int64_t i, const Reading& reading, std::span<float> out) const;
  /// code of the sample, scale and zero as stored.
  uint8_t code(int64_t i, int64_t col) const noexcept { return codes_[static_cast<size_t>(i * weight_.k + col)]; }
  float scale(int64_t i, int64_t group, const Reading& reading) const noexcept;
  int zero(int64_t i, int64_t group) const noexcept { return zeros_[static_cast<size_t>(i * groups_ + group)]; }
  int64_t group_of(int64_t col) const noexcept { return groups_of_[static_cast<size_t>(col)]; }

 private:
  int64_t stored_group(size_t col) const;
  int64_t source_row(int64_t i, const Reading& reading) const noexcept {
    return i - i % 8 + reading.rows[static_cast<size_t>(i % 8)];
  }
  double mean_code(int64_t i, int64_t group) const noexcept { return means_[static_cast<size_t>(i * groups_ + group)]; }

  const formats::PackedWeight& weight_;
  int64_t groups_;
  std::vector<int64_t> rows_;
  std::vector<int32_t> groups_of_;          // [k]
  std::vector<uint8_t> codes_;              // [rows][k]
  std::vector<float> scales_;               // [n][groups], all rows
  std::vector<uint8_t> zeros_;              // [rows][groups]
  std::vector<double> means_, deviations_;  // of the codes, [rows][groups]
};

/// Correlation of log energies under an order of the columns of `a`.
double profile_match(std::span<const double> a, std::span<const double> b, const Order& order);

}  // namespace w4q::verify
