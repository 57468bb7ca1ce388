// One decoder layer on the GPU, for what goes through a model layer by layer with no more than one of them there: the
// twin of model::LayerDecoder. Windows of one length stand below one another and are decoded by themselves.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "decoder_cuda/cache.h"
#include "decoder_cuda/layer_runner.h"
#include "decoder_cuda/model.h"
#include "decoder_cuda/rope.h"

namespace w4q::decoder_cuda {

/// Windows of a run among all that go through the model.
struct CudaWindows {
  int64_t first = 0, count = 1;
  const float* layer_embeddings = nullptr;  ///< of the layer, [count · length, layer_embedding_size], where it has some
};

class CudaLayerDecoder {
 public:
  /// Windows of `length` tokens, at least 2, up to `windows` of them at a time. Of `all` windows the keys and values stay
  /// that later layers read; none: there must not be such layers. `config` and `stream` must outlive it. Throws
  /// unsupported for heads of more than 512 values, device when the memory does not suffice.
  CudaLayerDecoder(const model::ModelConfig& config, int64_t length, int64_t windows, const device::Stream& stream,
                   int64_t all = 0);

  /// Brings the weights of the layer that the next runs are of to the GPU. Throws as upload_layer and LayerRunner.
  void load(const model::LayerWeights& weights);
  /// Gives back the weights and the activations.
  void release();

  /// x = layer(x) for `windows` windows, [windows · length, hidden] fp32 in GPU memory. `observer` sees what linear
  /// layers read, in f16.
  void run(float* x, const CudaWindows& windows, const CudaObserver& observer);
  void run(float* x, int64_t windows, const CudaObserver& observer) { run(x, {.count = windows}, observer); }
  /// The same for blocks [first, end) of the layer.
  void run_blocks(float* x, const CudaWindows& windows, size_t first, size_t end, const CudaObserver& observer);
  void run_blocks(float* x, int64_t windows, size_t first, size_t end, const CudaObserver& observer) {
    run_blocks(x, {.count = windows}, first, end, observer);
  }
  size_t blocks() const noexcept { return weights_.blocks.size(); }

 private:
  void attend(const CudaBlock& block, const CudaWindows& windows);
  /// Keys and values of layers of a model that later ones read.
  struct Kept {
    kernels::PagedLayer layer;               ///< where window 0 has them
    int64_t key_bytes = 0, value_bytes = 0;  ///< of a window
    device::DeviceBuffer keys, values;

    kernels::PagedLayer of(int64_t window) const;
  };
  Kept keep_keys(int64_t layer, int64_t windows);
  kernels::PagedLayer scratch_keys(const model::AttentionConfig& attention);
  void recall(const CudaBlock& block, int64_t windows);

  const model::ModelConfig& config_;
  const int64_t length_, most_windows_;
  const device::Stream& stream_;
  CudaCache cache_;
  CudaRopes ropes_;
  std::map<int64_t, Kept> kept_;  ///< by layer
  CudaLayer weights_;
  device::DeviceBuffer delta_;  ///< what a delta net remembers of a window
  std::optional<LayerRunner> runner_;
};

}  // namespace w4q::decoder_cuda
