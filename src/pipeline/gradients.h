// Streams calibration text through a model and back: forward one decoder layer at a time, each layer's input kept, then
// from the loss behind the last layer to the first one. What comes of it is what errors of a linear's outputs cost: sums
// over tokens of g·gᵀ, g the gradient of the loss by the outputs (docs/quality.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/opened.h"
#include "pipeline/calibrate.h"
#include "pipeline/hidden_states.h"
#include "quantize/statistics.h"

namespace w4q::pipeline {

struct GradientOptions {
  bool weighted_inputs = false;          ///< collect LinearGradients::weighted_inputs
  int64_t max_memory = 0;                ///< bytes that the process should stay below; 0: no limit
  int64_t reserved_memory = 0;           ///< of these, bytes that the caller needs for itself
  std::filesystem::path spill_at = {};   ///< where layers' inputs that do not fit go: a hidden folder beside this path
  std::function<void()> on_window = {};  ///< called after each window of each layer, on either way
  /// Walk on the GPU where it has a way for all layers, without weighted inputs, for next_costs(); null: on the CPU.
  std::shared_ptr<quantize::CudaWork> gpu = {};
};

/// Of one linear, over all tokens of all windows.
struct LinearGradients {
  std::string name;                           ///< module path
  quantize::InputStatistics outputs;          ///< rows g [n], with their Gram matrix Σ gᵀg
  quantize::InputStatistics weighted_inputs;  ///< rows |g|·x [k], with Σ |g|² xᵀx; of width 0 where nobody asked
};

/// The walk. Holds, beside what HiddenStates keeps of windows × layers, one layer's weights and sums.
class GradientWalk {
 public:
  /// `model` must outlive it. The loss is the cross entropy of each token of a window given those before it, summed.
  /// Throws unsupported as model::require_gradients, bad_argument when max_memory is not enough for one layer.
  GradientWalk(const model::OpenedModel& model, CalibrationWindows windows, const GradientOptions& options);
  ~GradientWalk();

  /// The linears of the layer before, in model order: those of the last layer come first. Throws internal after the
  /// first layer, bad_file naming a linear whose gradients are not finite. Does not depend on the number of threads.
  std::vector<LinearGradients> next();
  /// The same as means of g·gᵀ alone: upper triangles, one linear's behind the other's.
  void next_costs(std::span<float> to);
  /// The loss of all windows, in nats; known once next() was called.
  double loss() const noexcept;
  /// Matrices of hidden states that lie on disk.
  int64_t spilled() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What errors of a layer's outputs cost, by module path: means of g·gᵀ [n, n], the upper triangle.
using LayerCosts = std::map<std::string, std::span<const float>, std::less<>>;

/// As much of the calibration text as the way back goes over: at most 65,536 tokens, the first 512 of windows that lie
/// evenly. What errors of outputs cost is known from fewer tokens than what layers read.
struct GradientShape {
  int64_t samples = 0, length = 0;
};
GradientShape gradient_shape(int64_t samples, int64_t length);
CalibrationWindows gradient_windows(const CalibrationWindows& windows);

/// Those of all layers, which the walk finds last layer first and packing wants first layer first: in memory as far as
/// that goes, in files beyond.
class OutputCosts {
 public:
  /// Walks at once; progress goes to stderr. `keep_bytes`: of the costs, in memory. Throws as GradientWalk.
  OutputCosts(const model::OpenedModel& model, const CalibrationWindows& windows, const GradientOptions& options,
              int64_t keep_bytes);
  ~OutputCosts();

  /// Valid until the next call.
  LayerCosts layer(int64_t index);

 private:
  const model::ModelConfig& config_;
  std::unique_ptr<HiddenStates> triangles_;  // a row for each layer: upper triangles of its linears
};

/// Bytes of the costs of all layers.
int64_t output_costs_bytes(const model::ModelConfig& config);
/// Bytes that the way back through one layer takes beside the layers' inputs.
int64_t gradient_memory(const model::OpenedModel& model, int64_t length, bool weighted_inputs);

}  // namespace w4q::pipeline
