// Tables learned by weighted Lloyd iterations, wherever the weights are: who has them sums up what each entry stands for.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "quantize/kbit_panel.h"

namespace w4q::quantize {

/// What the entries of a table stand for where weights are rounded with it, and the error that leaves: in fp64, in the
/// order of blocks, columns and rows of a panel (class E0).
struct EntrySums {
  std::array<double, KbitLevels::max_codes> weighted{};  ///< Σ importance · scale · target
  std::array<double, KbitLevels::max_codes> weights{};   ///< Σ importance · scale²
  double error = 0, power = 0;                           ///< Σ importance · miss², Σ importance · target²

  void add(const EntrySums& other, double share = 1);
  /// One of `count` weights, the sums of its panels. Each counts as much as another, whatever its size: what it loses is
  /// a share of its own outputs.
  void add_weight(std::span<const EntrySums> panels, int64_t count);
};

/// The sums for a table as it decodes, its factor included.
using SumEntries = std::function<EntrySums(std::span<const float> codebook)>;

/// Each entry to the weighted mean of what it stands for, until nothing is gained; `start` itself where that lessens the
/// error by no more than the share `worthwhile`. Largest magnitude 1, gaps as check_codebook wants; the factor is
/// 2^exponent.
std::vector<float> learned_table(std::span<const float> start, int exponent, double worthwhile, const SumEntries& sums);

}  // namespace w4q::quantize
