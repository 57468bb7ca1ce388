// Codes of one pass held against the scales of their blocks, of any family: what a quantizer leaves between the two
// whatever it rounded, and a plane in another's place does not.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "formats/packed.h"
#include "verify/conventions/sample.h"

namespace w4q::verify {

/// Sizes of norms of blocks (rotated schemes): the spread of log Σ level², as stored and put together of other rows.
struct Spread {
  double stored = 0, mixed = 0;
  double blocks = 0;
};

/// What codes say of zero points that are all one and the same (BlockSample::even_zeros).
struct EvenZeros {
  bool even = false;
  int64_t zero = 0;
  double ratio = 0;  ///< how means of groups vary, over what chance makes of codes that vary as those of groups do
  double ends = 0;   ///< of the quarter of the groups that lean most: the share that reaches both ends of the range
};

/// Groups whose codes reach both ends of their range, as their least and largest weight do, far from their zero point.
struct FarZeros {
  int64_t groups = 0, row = 0, group = 0;  ///< how many, and the first
  double steps = 0, others = 0;  ///< from the mean code: of the nearest of these, of the farthest of all others
};

/// The slope of scales over codes where scales stand in another order.
struct Reordered {
  std::string_view order;
  Slope match;
};

/// A scale that stands out: in standard deviations and, where blocks hardly differ, as a logarithm.
inline constexpr double most_spreads = 12, least_loud = 2;

class BlockSample {
 public:
  /// A canonical weight that passed validation, of which all codes up to 2^18, of a larger one 2^17 in blocks of rows spread
  /// evenly are taken.
  explicit BlockSample(const formats::PackedWeight& canonical);

  /// Whether blocks stand in rows, so that they can be looked at: not so where those of a flat matrix cross row ends.
  bool readable() const noexcept { return groups_ > 0; }
  int64_t rows() const noexcept { return static_cast<int64_t>(rows_.size()); }
  int64_t groups() const noexcept { return groups_; }
  /// Shares of the codes, of blocks whose codes are not all the same.
  std::vector<double> histogram() const;
  /// Mean of code − zero point, in steps.
  double mean_step() const;
  /// Rows of four blocks or more in which all codes of the row are the same though their scales differ.
  int64_t constant_rows() const;
  /// The slope of −log scale over log (deviation of the codes) within rows: about 1 where scales follow from codes.
  Slope scale_match() const;
  /// The same with the scales of another weight of this scheme and size in the place of its own.
  Slope scale_match(const formats::PackedWeight& other) const;
  /// The order other than the stored one with the largest slope.
  Reordered best_order() const;
  /// Root of the mean square of what codes and scales stand for, in a usual group: one outlier makes no size.
  double size() const;
  /// Mean square of the codes around their zero points, over that with the highest bit turned. Integers.
  double ends_over_middle() const;
  /// Whether all scales are one.
  bool unscaled() const;
  /// Standard deviation of log scale within rows; of whole rows between neighbours.
  double scale_spread() const;
  Spread spread() const;
  /// Whether rows are nearly multiples of each other: blocks that stand above one another tell one thing then, and not many.
  bool rows_are_alike() const;
  /// ⟨x⁴⟩ / ⟨x²⟩² of codes around their groups' means: 2.4 and more of normal weights, 1.8 to 2.1 of uniform ones, whose blocks
  /// all reach as far and differ by chance alone.
  double kurtosis() const;
  /// The slope of the mean code over the zero point of a group: 1 where zeros follow from codes; no error: they are all
  /// the same, or none.
  Slope zero_match() const;
  /// Blocks whose scale is zero though their codes differ, in the rows that were looked at.
  int64_t empty_blocks() const noexcept { return empty_; }
  int64_t blocks() const noexcept { return rows() * groups_; }
  /// Blocks of 16 and more whose codes are all the same though their scale is neither zero nor the commonest.
  int64_t constant_blocks() const;
  /// The block whose scale stands out of its row and of its group though its codes are spread as those of others are:
  /// log scale beyond the medians of both, over the same of the next such block.
  /// Blocks of 16 and more whose codes are all the same though their scale is as those of others are.
  int64_t lone_constant_blocks() const;
  /// Of integers: blocks of 16 and more whose codes are all one that stands for something.
  int64_t one_value_blocks() const;
  /// Of integers in groups of 32 and more: whoever takes a group's least and largest weight for the ends of its codes moves
  /// its zero point, and means of groups with it.
  EvenZeros even_zeros() const;
  /// Of groups of 64 and more with zero points.
  FarZeros far_zeros() const;
  /// Blocks of a table none of whose codes is at one of its ends, though their codes differ.
  int64_t endless_blocks() const;
  /// The levels; of kbit, which stores them times a power of two, with a largest magnitude of 1. Empty: integers.
  std::vector<float> table() const;
  struct Loudest {
    int64_t row = 0, group = 0;
    double above = 0;   ///< log of the scale over what row and group have
    double next = 0;    ///< the same of the next one
    double spread = 0;  ///< a standard deviation of all, from the median of magnitudes

    /// Those behind: the first of equals stays.
    void add(const Loudest& later);
  };
  /// By scales, and by what scales and codes stand for together, which spreads less. Of scales all rows are looked at.
  Loudest loudest() const;
  /// `sign` −1: of what is too small.
  Loudest loudest_values(double sign) const;
  int64_t negative_scales() const noexcept { return negative_; }
  int64_t scales() const noexcept { return std::ssize(log_scales_); }
  /// The share of scales from 1/2 to 2 in size.
  double scales_near_one() const noexcept {
    return log_scales_.empty() ? 0 : static_cast<double>(near_one_) / static_cast<double>(log_scales_.size());
  }
  /// Whether a block is scaled so that its largest weight reaches the end of the table.
  bool by_largest() const noexcept { return by_largest_; }

 private:
  void read_codes();
  /// Those of 16 codes and more: all, all but a rest at the end, or none.
  int64_t long_groups() const;
  /// Whether a block with one outlier is told from the others, whose usual log deviation this is: not where nearly all
  /// weights were taken out.
  bool outliers_show(double usual) const;
  /// Log deviations of a row's levels by group, of any row; NaN: all are the same.
  std::vector<double> deviations_of(int64_t row) const;
  void measure();
  void find_ends();
  /// Of a variance of levels; NaN: what rounding leaves of nothing.
  double log_deviation(double variance) const noexcept;
  /// Whether the codes of a group reach both ends of their range, but for a step that rounding takes.
  bool reaches_both_ends(size_t at) const noexcept {
    return least_[at] <= 1 && most_[at] + 2 >= (1 << weight_.scheme.bits);
  }
  double log_scale(int64_t index) const noexcept { return log_scales_[static_cast<size_t>(index)]; }
  Slope match_of(const std::vector<int64_t>& order) const;
  /// Of a log scale for each block of the rows that were taken; NaN: zero.
  /// E4M3 next to its smallest values is too coarse for a block's largest weight to reach the end of its codes: what scales
  /// must have for it.
  double least_fine(std::span<const double> log_scales) const;
  Slope match_of_scales(std::span<const double> log_scales) const;
  float level(size_t row, size_t col) const noexcept { return levels_[row * static_cast<size_t>(weight_.k) + col]; }

  const formats::PackedWeight& weight_;
  bool by_largest_ = true;
  int64_t groups_ = 0;
  std::vector<int64_t> rows_;
  std::vector<int32_t> group_of_;   // [k]
  std::vector<float> table_;        // levels by code
  double largest_ = 0;              // of their magnitudes, which a power of two may have made small; of integers a step
  std::vector<float> levels_;       // [rows][k], what a code says in units of its scale
  std::vector<uint8_t> codes_;      // [rows][k]
  std::vector<double> deviations_;  // log, of levels, [rows][groups]; NaN: all are the same
  std::vector<double> means_, zeros_;
  std::vector<uint8_t> least_, most_;  // of integers: codes of a group, [rows][groups]
  std::vector<double> log_scales_;     // [n][groups]; NaN: zero
  int64_t empty_ = 0, negative_ = 0, near_one_ = 0;
};

}  // namespace w4q::verify
