// A mixture of experts with what stands beside it, forth and back.
#pragma once

#include <vector>

#include "core/views.h"
#include "model/gated_gradient.h"
#include "model/layer_gradient.h"
#include "model/model.h"
#include "model/router.h"
#include "model/scratch.h"

namespace w4q::model {

/// What a mixture keeps of its way forward for its way back, and its scratch.
struct MixtureMemory {
  GatedMemory mlp;
  Floats routed_input, expert_input, logits, shared_logits, sum, output;
  Floats by_sum, by_rows, by_shared, by_logits, by_shared_logits, by_routed, by_expert_input, part, rows, row_gradients;
  Routing routing;
};

/// Experts are run again on the way back: nothing of them is kept.
class MixtureGradient {
 public:
  MixtureGradient(const LayerWeights& weights, const Block& block, float eps, MixtureMemory& memory)
      : weights_(weights), block_(block), eps_(eps), memory_(memory) {}

  /// `x`: the residual stream, which router and experts may read past the block's norm; `input`: behind that norm.
  /// Returns what experts and the shared MLP add.
  MatrixView<float> forward(MatrixView<const float> x, MatrixView<const float> input);
  /// From the gradient by that to those by x and by input.
  void backward(MatrixView<const float> x, MatrixView<const float> input, MatrixView<const float> by_output,
                MatrixView<float> by_x, MatrixView<float> by_input, const GradientObserver& observer);

 private:
  std::span<const float> norm(NormRole role) const;
  std::span<const float> vector(VectorRole role) const;
  const kernels::LinearWeight& weight_of(const PlannedLinear& linear) const {
    return weights_.linears[linear.position];
  }
  const InputGroup& router() const { return block_.groups.front(); }
  bool has_shared() const { return std::ssize(block_.groups) > 1 + 2 * block_.mixture.experts; }
  bool shares() const { return router().linears.size() > 1; }
  /// What the router and what the experts read.
  MatrixView<const float> routed_input(MatrixView<const float> x, MatrixView<const float> input);
  MatrixView<const float> expert_input(MatrixView<const float> x, MatrixView<const float> input);
  GatedGradient expert(size_t index);
  GatedGradient shared();
  /// Which of the routing's entries go to each expert.
  std::vector<std::vector<size_t>> takers() const;
  MatrixView<float> rows_of(const std::vector<size_t>& entries, MatrixView<const float> from, Floats& to) const;
  int64_t row_of(size_t entry) const { return static_cast<int64_t>(entry) / block_.mixture.chosen; }

  void experts_back(MatrixView<const float> from, MatrixView<const float> by_sum, std::vector<float>& by_shares,
                    MatrixView<float> by_input, const GradientObserver& observer);
  void shared_back(MatrixView<const float> input, MatrixView<const float> by_output, MatrixView<float> by_input,
                   const GradientObserver& observer);

  const LayerWeights& weights_;
  const Block& block_;
  const float eps_;
  MixtureMemory& memory_;
};

}  // namespace w4q::model
