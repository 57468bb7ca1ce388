// Calibration on the GPU: the layers of calibrate.h run there, and what linears read is summed where it is. Hidden
// states stay in GPU memory as far as that goes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/views.h"
#include "device/context.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/model.h"
#include "pipeline/exchange_cuda.h"
#include "pipeline/hidden_states.h"
#include "pipeline/layer_turns.h"
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
/// Frees what the next layer would have found there.
void free_memory(const std::shared_ptr<quantize::CudaWork>& work);

struct CalibrationShape {
  int64_t samples = 0, length = 0;  ///< windows and their tokens
  bool gram = true;                 ///< collect Gram matrices
  bool pairs = false;               ///< of what two models hand on (calibrate.h)
};

/// The quantized model's weights of a layer, and the windows of both models that are not resident.
struct PairedStates {
  const model::LayerWeights& quantized;
  ChangedLinears changed;
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

  /// What a layer adds of its own in a window, [length, layer_embedding_size].
  using EmbedLayer = std::function<void(int64_t window, MatrixView<float> rows)>;
  /// What a rank does in a round of layers; a process by itself runs one after the other.
  struct Turn {
    LayerTurn turn;
    const model::LayerWeights* weights = nullptr;  ///< of the turn's layer; null: it has none
    ExchangeCuda* exchange = nullptr;              ///< null: hidden states neither come nor go
    bool keep_gram = false;                        ///< Gram matrices stay on the GPU (InputStatistics::gpu_gram)
    EmbedLayer embed_layer;                        ///< empty where layers add nothing of their own
  };
  /// Runs the turn's layer over all windows; `others` holds those that are not resident. Windows go through a layer in
  /// chunks of a fixed size, so that sums depend neither on the memory nor on who ran the layers before. Empty where
  /// nobody wants sums. `on_window` may be empty.
  LayerStatistics run(const Turn& turn, HiddenStates& others, const std::function<void()>& on_window);

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
