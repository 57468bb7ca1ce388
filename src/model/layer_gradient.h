// The way back through a model, one decoder layer at a time: from the gradient of a loss by what a layer puts out to
// that by what it takes in. Gradients of activations alone; whoever wants to know what weights are worth sees each
// linear's inputs and the gradients of its outputs as they pass (docs/quality.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/views.h"
#include "model/model.h"

namespace w4q::model {

/// Sees a linear's inputs [rows, k] and the gradients of the loss by its outputs [rows, n]; the last linears of a layer
/// come first.
using GradientObserver =
    std::function<void(const PlannedLinear& linear, MatrixView<const float> input, MatrixView<const float> gradient)>;

/// What a layer has that there is no way back through: "a gated delta net", "embeddings of its own", "the keys of another layer"; empty: nothing.
std::string_view obstacle_to_gradients(const LayerPlan& plan);
/// Throws unsupported, naming the first layer with such an obstacle. `what` wants the way back: "two-sided feedback".
void require_gradients(const ModelConfig& config, std::string_view what);

/// Holds scratch only: for one block some ten matrices of activations. Not thread-safe.
class LayerGradient {
 public:
  /// `config` must outlive it.
  explicit LayerGradient(const ModelConfig& config);
  ~LayerGradient();
  LayerGradient(LayerGradient&&) noexcept;

  /// `x` [rows, hidden] is what the layer takes in of a sequence from position 0 on; it is run again. `gradient`, by what
  /// the layer puts out, becomes that by x. Does not depend on the number of threads. Throws internal when the shapes
  /// differ or the layer has an obstacle.
  void run(const LayerWeights& weights, MatrixView<const float> x, MatrixView<float> gradient,
           const GradientObserver& observer = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The final norm and the head, and the loss of a window behind them: the cross entropy of each token given those before
/// it, in nats, summed over ids[1], ids[2], …
struct LossGradient {
  const ModelConfig& config;
  const std::vector<float>& final_norm;
  const kernels::LinearWeight& head;

  /// `x` [ids, hidden], what the last layer puts out, becomes the gradient of the loss by it, which is returned. Logits of
  /// 256 rows at a time exist. Throws internal when the shapes differ.
  double run(std::span<const int32_t> ids, MatrixView<float> x) const;
};

}  // namespace w4q::model
