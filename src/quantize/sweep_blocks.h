// Blocks of a weight that sweeps round as a whole, and the damped Gram matrix that errors are counted by.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "quantize/block_rounding.h"
#include "quantize/error_factor.h"

namespace w4q::quantize {

/// How often all blocks are rounded anew, and then all codes are looked at alone; where blocks are too wide, codes are
/// instead.
inline constexpr int block_sweeps = 2, code_sweeps = 1;
/// Columns whose codes are decided with one product behind them.
inline constexpr int64_t sweep_code_unit = 32;
/// Of what a change gains to first order, the share that its second order may cost: products in fp32 vouch for no more.
inline constexpr double certain_share = 1 - 1e-4;

/// H: the Gram matrix, and what damping adds to its diagonal.
struct DampedGram {
  MatrixView<const float> gram;
  float ridge = 0;

  float at(int64_t row, int64_t column) const { return gram.row(row)[column] + (row == column ? ridge : 0.0f); }
  std::vector<float> diagonal() const {
    std::vector<float> result;
    for (int64_t c = 0; c < gram.rows; ++c) result.push_back(gram.row(c)[c]);
    return result;
  }
};

/// A block that is rounded as a whole: H at its columns, and its factor.
class WholeBlock {
 public:
  WholeBlock(const DampedGram& gram, int64_t first, int64_t count, std::string_view name);

  int64_t first() const noexcept { return first_; }
  int64_t columns() const noexcept { return factor_.width(); }
  /// In the order of the factor.
  int64_t column(int64_t position) const { return first_ + factor_.order()[static_cast<size_t>(position)]; }
  const ErrorFactor& factor() const noexcept { return factor_; }

  /// x·H⁻¹ in place, columns in the order of the factor; x stands transposed, [columns, rows].
  void solve(MatrixView<float> x) const;

  /// d·H for a row of the block's columns, as they stand; in fp64.
  std::array<double, widest_whole_block> product(std::span<const float> d) const;
  /// d·H·dᵀ.
  double curvature(std::span<const float> d) const {
    const auto sums = product(d);
    return std::inner_product(d.begin(), d.end(), sums.begin(), 0.0);
  }

 private:
  int64_t first_;
  std::vector<float> own_;  // as its columns stand
  ErrorFactor factor_;
  double mean_ = 1;  // of the diagonal, which the factor leaves out
};

/// The matrix that `factor` is of. `what`: "the Gram matrix of its inputs". Throws bad_argument unless it is width × width.
DampedGram damped_gram(MatrixView<const float> gram, const ErrorFactor& factor, int64_t width, std::string_view name,
                       std::string_view what);

/// In the order of the sweeps; none where blocks are too wide.
std::vector<std::unique_ptr<const WholeBlock>> whole_blocks(const DampedGram& gram, int64_t block,
                                                            std::string_view name);

}  // namespace w4q::quantize
