// Calibration on the GPU: the layers of calibrate.h run there, and what linears read is summed where it is. Hidden
// states stay in GPU memory as far as that goes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/views.h"
#include "device/context.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/model.h"
#include "pipeline/hidden_states.h"
#include "pipeline/linear_groups.h"
#include "quantize/asymmetric.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

/// The stream and the memory that calibrating and packing a layer on a GPU share; null where cuBLAS cannot be loaded,
/// which leaves the work to the CPU. Throws device in builds without CUDA.
std::shared_ptr<quantize::CudaWork> make_cuda_work(device::Context& gpu);
/// The GPU of such work; null: there is none.
device::Context* gpu_of(const std::shared_ptr<quantize::CudaWork>& work);

struct CalibrationShape {
  int64_t samples = 0, length = 0;  ///< windows and their tokens
  bool gram = true;                 ///< collect Gram matrices
  bool pairs = false;               ///< of what two models hand on (calibrate.h)
};

/// The quantized model's weights of a layer, and the windows of both models that are not resident.
struct PairedStates {
  const model::LayerWeights& quantized;
  bool changed;  ///< whether they are others than in the call before
  HiddenStates &plain_others, &quantized_others;
};

class CalibrationCuda {
 public:
  /// `config` must outlive it. Throws as decoder_cuda::CudaLayerDecoder.
  CalibrationCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config,
                  const CalibrationShape& shape);
  ~CalibrationCuda();

  /// Windows 0 … resident() − 1 have their hidden states in GPU memory, the others in HiddenStates.
  int64_t resident() const noexcept;
  void put(int64_t window, MatrixView<const float> hidden);

  /// Runs a layer over all windows; `others` holds those that are not resident. With `keep_gram` the Gram matrices stay
  /// on the GPU (InputStatistics::gpu_gram). `embed_layer` gives what the layer adds of its own in a window, [length,
  /// layer_embedding_size]; without such layers it may be empty, as `on_window` may.
  using EmbedLayer = std::function<void(int64_t window, MatrixView<float> rows)>;
  LayerStatistics run(const model::LayerWeights& weights, int64_t layer, HiddenStates& others, bool keep_gram,
                      const EmbedLayer& embed_layer, const std::function<void()>& on_window);

  /// With pairs, run() leaves hidden states as they are. This goes on to a layer, of these weights as the model is …
  void begin_pairs(const model::LayerWeights& plain);
  /// … this gives both models' inputs of a group in its block `block`, kept on the GPU with `keep` …
  quantize::InputPair pair(const model::InputGroup& group, size_t block, const PairedStates& states, bool keep);
  /// … and this leaves hidden states behind the layer.
  void finish_pairs(const PairedStates& states);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
