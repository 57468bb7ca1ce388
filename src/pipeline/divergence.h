// KL between what a model predicts from hidden states and what it predicts from others, with no more than a few rows of
// logits in memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/linear/linear.h"
#include "model/opened.h"

namespace w4q::pipeline {

/// The final norm and the head.
class DivergenceMeter {
 public:
  /// `model` must outlive it.
  explicit DivergenceMeter(const model::OpenedModel& model);

  /// Of every one of `found` the sum over rows of KL(expected ‖ found), nats. All are [rows, hidden] in fp32 before the
  /// final norm; not finite where predictions are not.
  std::vector<double> measure(const std::vector<float>& expected,
                              std::span<const std::vector<float>* const> found) const;

 private:
  void logits(const std::vector<float>& hidden, int64_t row, MatrixView<float> out) const;
  double kl(std::span<const float> expected, std::span<const float> found, int64_t rows) const;

  const model::OpenedModel& model_;
  kernels::LinearWeight head_;
  std::vector<float> norm_;
};

}  // namespace w4q::pipeline
