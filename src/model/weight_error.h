// How far a packed weight is from the one it was made of.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear/linear.h"

namespace w4q::model {

/// Sums over all weights of one tensor, in fp64; they add up over tensors.
struct WeightError {
  double signal = 0;     ///< Σ w²
  double noise = 0;      ///< Σ (w − ŵ)²
  double max_error = 0;  ///< max |w − ŵ|
  int64_t row = 0;       ///< where the largest error is
  int64_t col = 0;

  /// ‖w − ŵ‖ / ‖w‖; 0 for two equal tensors.
  double relative() const noexcept;
  /// 10·log10(signal / noise) in dB; infinite for two equal tensors.
  double sqnr() const noexcept;
  /// Adds another tensor's sums; keeps the larger maximum.
  void add(const WeightError& other) noexcept;
};

/// Compares two weights of the same n × k, decoded a block of rows at a time. The result does not depend on the thread
/// count. `rows`, where there is one, gets the errors of each row. Throws mismatch when the sizes differ.
WeightError compare_weights(const kernels::LinearWeight& reference, const kernels::LinearWeight& candidate,
                            std::vector<WeightError>* rows = nullptr);

}  // namespace w4q::model
