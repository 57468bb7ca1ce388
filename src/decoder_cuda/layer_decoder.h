// One decoder layer on the GPU, for what goes through a model layer by layer with no more than one of them there: the
// twin of model::LayerDecoder. Windows of one length stand below one another and are decoded by themselves.
#pragma once

#include <cstdint>
#include <optional>

#include "decoder_cuda/cache.h"
#include "decoder_cuda/decoder.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/model.h"
#include "decoder_cuda/rope.h"

namespace w4q::decoder_cuda {

class CudaLayerDecoder {
 public:
  /// Windows of `length` tokens, at least 2, up to `windows` of them at a time. `config` and `stream` must outlive it.
  /// Throws unsupported for heads of more than 256 values, device when the memory does not suffice.
  CudaLayerDecoder(const model::ModelConfig& config, int64_t length, int64_t windows, const device::Stream& stream);

  /// Brings the weights of layer `layer`, which the next runs are of, to the GPU. Throws as upload_linears.
  void load(const model::LayerWeights& weights, int64_t layer);
  /// Gives back the weights and the activations.
  void release();

  /// x = layer(x) for `windows` windows, [windows · length, hidden] fp32 in GPU memory. `observer` sees what linear
  /// layers read, in f16.
  void run(float* x, int64_t windows, const CudaObserver& observer);

 private:
  void attend(int64_t windows);
  void observe(const CudaLinear& linear, const device::DeviceBuffer& input, int64_t rows,
               const CudaObserver& observer) const;
  void normalize(const device::DeviceBuffer& weight, float* x, int64_t rows);

  const model::ModelConfig& config_;
  model::ModelConfig one_layer_;
  const int64_t length_, most_windows_;
  const device::Stream& stream_;
  CudaCache cache_;
  CudaRope rope_;
  int64_t layer_ = 0;
  CudaLayer weights_;
  std::optional<CudaMultiplier> multiplier_;
  device::DeviceBuffer normed_, qkv_, attended_, gate_up_, gated_;
};

}  // namespace w4q::decoder_cuda
