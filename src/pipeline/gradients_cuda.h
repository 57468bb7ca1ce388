// The walk of gradients.h on the GPU: layers run and are gone back through there, and sums of gradients stay where they
// are made. So do the hidden states of as many windows as fit, and later their gradients; others go there and back.
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

  /// `samples` windows of `length` tokens. `config` must outlive it. Throws device when the memory does not suffice.
  GradientsCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config, int64_t samples,
                int64_t length);
  ~GradientsCuda();

  /// Whether what runs through the layers of this window stays on the GPU.
  bool keeps(int64_t window) const;
  /// The state [length, hidden] of a window that stays.
  void put(int64_t window, MatrixView<const float> x);

  /// The layer that is run and gone back through from now on.
  void load(const model::LayerWeights& weights);
  /// The state of a window through the layer: what stays of it, or x [length, hidden].
  void forward(int64_t window, MatrixView<const float> x);
  /// What forward() made of the last window.
  void fetch(MatrixView<float> to);
  /// The head and its norm, for losses.
  void load_head(std::span<const float> final_norm, const kernels::LinearWeight& head);
  /// Cross entropy of ids[1], …, summed; the state of the window, or x, becomes the gradient by it.
  double loss(int64_t window, std::span<const int32_t> ids, MatrixView<float> x);

  /// Back through the layer of input x, whose sums it adds to; what stays of the window, or `gradient`, becomes that by x.
  void back(int64_t window, MatrixView<const float> x, MatrixView<float> gradient);
  /// What was summed over the layer since load(), as GradientWalk::next_costs gives it. Throws as that does.
  void take_costs(std::span<float> to);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
