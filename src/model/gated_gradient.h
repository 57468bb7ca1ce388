// A gated MLP, of a layer or of an expert, forth and back.
#pragma once

#include <vector>

#include "core/views.h"
#include "model/gradient_observer.h"
#include "model/model.h"
#include "model/scratch.h"

namespace w4q::model {

/// What a gated MLP keeps of its way forward for its way back, and its scratch.
struct GatedMemory {
  std::vector<Floats> products, by_products;
  Floats gates, ups, mixed, output, by_mixed, by_gates, by_ups, part;
};

/// `inputs`: gate and up, or both as one; `output`: down. All must outlive it.
class GatedGradient {
 public:
  GatedGradient(const LayerWeights& weights, const Block& block, const InputGroup& inputs, const PlannedLinear& output,
                GatedMemory& memory)
      : weights_(weights), block_(block), inputs_(inputs), output_(output), memory_(memory) {}

  /// x [rows, k] as far as what down reads.
  void forward(MatrixView<const float> x);
  /// What down makes of it.
  MatrixView<float> output(int64_t rows);
  /// The same x, and the gradient by the output, to that by x.
  void backward(MatrixView<const float> x, MatrixView<const float> by_output, MatrixView<float> by_x,
                const GradientObserver& observer);

 private:
  const kernels::LinearWeight& weight_of(const PlannedLinear& linear) const {
    return weights_.linears[linear.position];
  }
  bool as_one() const { return inputs_.linears.size() == 1; }
  bool in_turn() const { return block_.storage == ExpertStorage::stacked_in_turn; }

  const LayerWeights& weights_;
  const Block& block_;
  const InputGroup& inputs_;
  const PlannedLinear& output_;
  GatedMemory& memory_;
};

}  // namespace w4q::model
