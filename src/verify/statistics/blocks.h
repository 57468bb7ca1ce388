// What the blocks of one pass say (block_sample.h) beside those of the others of its scheme and role.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/packed.h"
#include "verify/statistics/block_sample.h"

namespace w4q::verify {

/// Slopes, five standard errors above what was found, below which scales and zero points are those of other codes
/// where the other weights have theirs.
inline constexpr double least_scale_match = 0.35, least_zero_match = 0.5;

/// What one pass says.
struct BlockFigures {
  int64_t blocks = 0;    ///< 0: nothing that can be looked at
  int64_t empty = 0;     ///< of these, with a scale of zero though codes differ
  int64_t constant = 0;  ///< with codes that are all the same
  Slope match;
  bool light_tailed = false;  ///< codes are spread evenly
  double scale_spread = 0;
  double size = 0;        ///< of decoded weights
  double ends = 0;        ///< BlockSample::ends_over_middle
  bool unscaled = false;  ///< all scales are one
  Reordered reordered;
  Spread spread;
  Slope zeros;
  BlockSample::Loudest loudest, loudest_values, quietest_values;
  int64_t negative = 0;  ///< scales below zero, of `scales`
  int64_t scales = 0;
  int64_t one_value = 0;  ///< blocks whose codes are all one that stands for something
  EvenZeros even_zeros;
  FarZeros far_zeros;
  double near_one = 0;  ///< share of scales from 1/2 to 2 in size
  int64_t constant_rows = 0;
  int64_t lone_constant = 0, endless = 0;
  std::vector<float> table;
  std::vector<double> histogram;
  double mean_step = 0;
  double codes = 0;  ///< that the histogram counts
};
/// Of a canonical weight that passed validation.
BlockFigures figures_of(const formats::PackedWeight& canonical);

/// A pass of a linear, and whom it is compared with: those of its scheme and, among them, of its role.
struct BlockSubject {
  std::string name, scheme, role;
  BlockFigures figures;
};

/// Faults, each with the name of its linear: what nearly all others have and one lacks, beyond five standard errors.
std::vector<std::string> block_faults(std::span<const BlockSubject> subjects);

}  // namespace w4q::verify
