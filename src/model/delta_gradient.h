// A gated delta net, from its products to what its last linear reads, forth and back.
#pragma once

#include <functional>
#include <vector>

#include "core/views.h"
#include "model/delta_heads.h"
#include "model/gradient_observer.h"
#include "model/model.h"
#include "model/scratch.h"

namespace w4q::model {

/// What it keeps of its way forward for its way back, and its scratch.
struct DeltaGradientMemory {
  Floats raw, convolved, gates, raw_betas, betas, raw_decays, decays, out, history, state;
  Floats by_mixed, by_gates, by_betas, by_decays, by_out;
};

/// Of a sequence of `rows` from position 0 on. All must outlive it.
class DeltaGradient {
 public:
  DeltaGradient(const LayerWeights& weights, const Block& block, float eps, int64_t rows, DeltaGradientMemory& memory)
      : weights_(weights), block_(block), shape_(block.delta), eps_(eps), rows_(rows), memory_(memory) {}

  /// The products of its first group, to `mixed` [rows, values].
  void forward(std::vector<Floats>& products, MatrixView<float> mixed);
  /// After forward(): the gradient by `mixed`, to those by the products.
  void backward(MatrixView<const float> gradient, std::vector<Floats>& by_products, const NormObserver& norms);

 private:
  std::span<const float> vector(VectorRole role) const;
  const PlannedNorm& norm() const { return *block_.norm(NormRole::delta); }
  std::span<const float> norm_weight() const { return weights_.norms[norm().position]; }
  const std::vector<PlannedLinear>& linears() const { return block_.groups.front().linears; }
  bool as_two() const { return linears().size() == 2; }
  MatrixView<float> product(std::vector<Floats>& products, size_t index) const {
    return products[index].matrix(rows_, linears()[index].n);
  }
  MatrixView<float> of_values(Floats& memory) const { return memory.matrix(rows_, shape_.values()); }
  MatrixView<float> of_heads(Floats& memory) const { return memory.matrix(rows_, shape_.value_heads); }

  const LayerWeights& weights_;
  const Block& block_;
  const kernels::DeltaShape& shape_;
  const float eps_;
  const int64_t rows_;
  DeltaGradientMemory& memory_;
};

}  // namespace w4q::model
