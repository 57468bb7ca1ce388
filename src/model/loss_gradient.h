// Losses behind a model's last layer, and where the way back begins: at the head and the final norm.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "kernels/linear/linear.h"
#include "model/config.h"
#include "model/gradient_observer.h"

namespace w4q::model {

/// The final norm and the head, and losses of a window behind them, in nats. Logits of 256 rows at a time exist. Throw
/// internal when shapes differ.
struct LossGradient {
  const ModelConfig& config;
  const std::vector<float>& final_norm;
  const kernels::LinearWeight& head;

  /// The cross entropy of each token given those before it, summed over ids[1], ids[2], … `x` [ids, hidden], what the last
  /// layer puts out, becomes the gradient of the loss by it, which is returned.
  double run(std::span<const int32_t> ids, MatrixView<float> x) const;
  /// KL(teacher ‖ this) summed over rows, `expected` [rows, hidden] being what the teacher's last layer puts out. `norm`
  /// sees the final norm.
  double run(const LossGradient& teacher, MatrixView<const float> expected, MatrixView<float> x,
             const NormObserver& norm = {}) const;
  /// The same without a gradient: x stays.
  double divergence(const LossGradient& teacher, MatrixView<const float> expected, MatrixView<const float> x) const;
};

}  // namespace w4q::model
