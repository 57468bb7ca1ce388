// Two models side by side on the GPU (Calibration's pairs): what the model as it is and what the quantized one hand from
// block to block, and the inputs of a group in both.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "decoder_cuda/layer_decoder.h"
#include "pipeline/calibration_cuda.h"
#include "pipeline/window_chunks.h"
#include "quantize/asymmetric_cuda.h"

namespace w4q::pipeline {

/// The hidden states of both models.
struct PairedChunks {
  WindowChunks &plain, &quantized;
  int64_t batch = 1;  ///< windows of a chunk at most
};

class PairsCuda {
 public:
  /// Everything must outlive it.
  PairsCuda(quantize::CudaWork& work, const model::ModelConfig& config, const CalibrationShape& shape,
            const PairedChunks& chunks);

  /// As CalibrationCuda's. `plain` stays where it is until finish().
  void begin(const model::LayerWeights& plain);
  quantize::InputPair pair(const model::InputGroup& group, size_t block, const PairedStates& states, bool keep);
  void finish(const PairedStates& states);

 private:
  struct Batch {
    float *plain, *quantized;
    int64_t windows;
  };
  using Visit = std::function<void(const Batch&)>;

  void for_batches(const PairedStates& states, const Visit& visit);
  /// Both models up to block `end`, with the weights that stand.
  void advance(const Batch& batch, size_t end);
  void take(const PairedStates& states);
  /// A copy of hidden states, for a run that changes them.
  float* copy(const float* hidden, int64_t windows);

  quantize::CudaWork& work_;
  const CalibrationShape shape_;
  const PairedChunks chunks_;
  const int64_t window_values_;
  decoder_cuda::CudaLayerDecoder plain_, quantized_;
  bool loaded_ = false;
  size_t done_ = 0;                          ///< blocks of the layer that both are behind
  device::DeviceBuffer scratch_, captured_;  ///< hidden states; a group's inputs in the model as it is
};

}  // namespace w4q::pipeline
