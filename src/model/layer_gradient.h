// The way back through a model, one decoder layer at a time: from the gradient of a loss by what a layer puts out to
// that by what it takes in. Gradients of activations alone; whoever wants to know what weights are worth sees each
// linear's inputs and the gradients of its outputs as they pass (docs/quality.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "model/gradient_observer.h"
#include "model/model.h"

namespace w4q::model {

/// What a layer has that there is no way back through: "embeddings of its own", "the keys of another layer"; empty: nothing.
std::string_view obstacle_to_gradients(const LayerPlan& plan);
/// Of the first layer that has one, with its number: "layer 0 has embeddings of its own".
std::string obstacle_to_gradients(const ModelConfig& config);
/// Throws unsupported, naming the first layer with such an obstacle. `what` wants the way back: "two-sided feedback".
void require_gradients(const ModelConfig& config, std::string_view what);

struct GradientMemory;

/// What a layer keeps of one sequence's way forth for its way back: for a block some ten matrices of activations.
class GradientTape {
 public:
  GradientTape();
  ~GradientTape();
  GradientTape(GradientTape&&) noexcept;

 private:
  friend class LayerGradient;
  std::vector<GradientMemory> blocks_;
};

/// What a tape of a sequence of `length` tokens takes at most, for the largest layer of a model.
int64_t tape_bytes(const ModelConfig& config, int64_t length);

/// Holds scratch only: for one block some ten matrices of activations. Not thread-safe.
class LayerGradient {
 public:
  /// `config` must outlive it.
  explicit LayerGradient(const ModelConfig& config);
  ~LayerGradient();
  LayerGradient(LayerGradient&&) noexcept;

  /// `x` [rows, hidden] is what the layer takes in of a sequence from position 0 on; it is run again. `gradient`, by what
  /// the layer puts out, becomes that by x. `norms` sees those of the residual stream and of heads, and none inside a
  /// mixture. Does not depend on the number of threads. Throws internal when the shapes differ or the layer has an
  /// obstacle.
  void run(const LayerWeights& weights, MatrixView<const float> x, MatrixView<float> gradient,
           const GradientObserver& observer = {}, const NormObserver& norms = {});

  /// The same in two: x becomes what the layer puts out, bit for bit the same wherever the way back is kept …
  void forward(const LayerWeights& weights, MatrixView<float> x, GradientTape& tape);
  /// … and `gradient` that by x, of the layer and the sequence whose way forth is on the tape.
  void back(const LayerWeights& weights, MatrixView<float> gradient, GradientTape& tape,
            const GradientObserver& observer = {}, const NormObserver& norms = {});

 private:
  void check(const LayerWeights& weights, MatrixView<const float> x) const;
  void run_blocks(const LayerWeights& weights, MatrixView<float> x, GradientTape& tape, bool goes_on);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::model
