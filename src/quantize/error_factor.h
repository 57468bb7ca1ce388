// The error of a linear's outputs as a sum over columns that can be decided one after the other: the Gram matrix G of
// its inputs, damped, becomes M·diag(D)·Mᵀ with M unit upper triangular, so that tr(E·G·Eᵀ) = Σ_j D_j·|(E·M)_j|², and
// column j of E·M depends on the errors of columns up to j alone.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/views.h"

namespace w4q::quantize {

/// The order in which columns are decided: blocks of `block` columns stay together; the loudest block comes first, and
/// in it the loudest channel.
struct ColumnOrder {
  std::vector<int32_t> columns;  ///< the column at each position
  std::vector<int64_t> starts;   ///< the first position of each block, and the width after the last one
};
/// `diagonal` is that of the Gram matrix.
ColumnOrder column_order(std::span<const float> diagonal, int64_t block);

/// The mean of the diagonal, 1 where it is zero. Throws bad_file naming `name` for a value that is negative or not
/// finite.
double mean_diagonal(std::span<const float> diagonal, std::string_view name);

/// Throws bad_argument naming `name` unless the damping and the block make sense.
void check_damping(double damping, int64_t block, std::string_view name);
/// The next damping to try after one that did not suffice. Throws bad_file naming `name` when there is none.
double raised_damping(double damping, std::string_view name);

/// A pivot this small beside the diagonal has no digits left that the fp32 Gram matrix vouches for.
inline constexpr double least_pivot = 1e-7;

/// That order, and the factors in it.
class ErrorFactor {
 public:
  /// Factors `gram` [k, k], symmetric, plus `damping` times its mean diagonal on the diagonal. Where the factorization
  /// fails or loses its digits, the damping is raised tenfold until it does not. fp64, one copy of the matrix; the
  /// factors are fp32. Throws bad_argument for a negative damping or block, bad_file naming `name` when a value is not
  /// finite.
  ErrorFactor(MatrixView<const float> gram, int64_t block, double damping, std::string_view name);

  int64_t width() const noexcept { return static_cast<int64_t>(order_.columns.size()); }
  int64_t block() const noexcept { return block_; }
  /// The column at each position.
  std::span<const int32_t> order() const noexcept { return order_.columns; }
  /// The first position of each block, and the width after the last one.
  std::span<const int64_t> block_starts() const noexcept { return order_.starts; }
  /// Mᵀ by positions: row j holds M_ij for i < j, the rest is zero; [k, k].
  MatrixView<const float> coupling() const noexcept { return {coupling_.data(), width(), width()}; }
  /// D by positions, relative to the mean diagonal.
  std::span<const float> pivots() const noexcept { return pivots_; }
  /// The damping that was needed in the end.
  double damping() const noexcept { return damping_; }

 private:
  bool factor(MatrixView<const float> gram, double mean);

  int64_t block_;
  double damping_;
  ColumnOrder order_;
  std::vector<float> coupling_;
  std::vector<float> pivots_;
};

}  // namespace w4q::quantize
