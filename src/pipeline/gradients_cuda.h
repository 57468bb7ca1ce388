// The walk of gradients.h on the GPU: layers run and are gone back through there, and sums of gradients stay where they
// are made. Hidden states of a window at a time go there and back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/views.h"
#include "model/model.h"
#include "pipeline/gradients.h"

namespace w4q::pipeline {

class GradientsCuda {
 public:
  /// Whether there is this way for all layers of a model.
  static bool takes(const model::ModelConfig& config);

  /// Windows of `length` tokens. `config` must outlive it. Throws device when the memory does not suffice.
  GradientsCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config, int64_t length);
  ~GradientsCuda();

  /// The layer that is run and gone back through from now on.
  void load(const model::LayerWeights& weights);
  /// x [length, hidden] = layer(x).
  void forward(MatrixView<float> x);
  /// The head and its norm, for losses.
  void load_head(std::span<const float> final_norm, const kernels::LinearWeight& head);
  /// Cross entropy of ids[1], …, summed; x becomes the gradient by it.
  double loss(std::span<const int32_t> ids, MatrixView<float> x);

  /// Back through the layer, whose sums it adds to; `gradient` becomes that by x.
  void back(MatrixView<const float> x, MatrixView<float> gradient);
  /// What was summed over the layer since load(), as GradientWalk::next_costs gives it. Throws as that does.
  void take_costs(std::span<float> to);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
