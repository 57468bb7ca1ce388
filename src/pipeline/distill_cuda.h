// Distillation's ways forth and back on the GPU: the quantized model stays there, decoded to f16, with its norms, as far
// as there is memory; what it is compared with comes window by window.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/views.h"
#include "model/model.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

struct DistilledHead {
  std::span<const float> final_norm;
  const kernels::LinearWeight& head;
};

class DistillCuda {
 public:
  /// Whether there is this way for all layers of a model.
  static bool takes(const model::ModelConfig& config);

  /// A layer of the quantized model as it is now; valid until the next call.
  using Layers = std::function<const model::LayerWeights&(int64_t layer)>;

  /// Sequences of `length` tokens, `samples` of them at a time. `config` must outlive it. Throws device when the memory
  /// does not suffice.
  DistillCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config, int64_t length,
              int64_t samples, Layers layers);
  ~DistillCuda();

  void load_heads(const DistilledHead& teacher, const DistilledHead& student);
  /// The first layers of the quantized model stay there, as many as the memory beside all else takes; the others are
  /// decoded whenever they are needed.
  void keep_layers();
  void put_norms(int64_t layer, const model::LayerWeights& weights);
  void put_final_norm(std::span<const float> weights);

  /// Of `count` sequences as the 16-bit model sees them the first keeps() stay on the GPU from put_expected() on; the
  /// views of these are not looked at below.
  void keep_expected(int64_t count);
  int64_t keeps() const noexcept;
  void put_expected(int64_t sequence, MatrixView<const float> embedded);

  /// x [length, hidden], of such a sequence, goes through a layer of the 16-bit model.
  void load_teacher(const model::LayerWeights& weights);
  void teach(int64_t sequence, MatrixView<float> x);

  /// Embedded sequence `index`, and the way forth of the first `count`.
  void put(size_t index, MatrixView<const float> embedded);
  void forward(size_t count);
  /// What the 16-bit model hands to its head: of a sequence as teach() left it, or `rows`.
  struct Expected {
    int64_t sequence = 0;
    MatrixView<const float> rows;
  };
  /// KL of sequence 0, or of one that goes back() then.
  double divergence(const Expected& expected);
  double loss(size_t index, const Expected& expected);
  /// The way back of the first `count`: then gradients of all norms are among the sums.
  void back(size_t count);
  /// Σ gradient · x̂ since the last time.
  std::vector<double> take_sums(const model::PlannedNorm& norm);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
