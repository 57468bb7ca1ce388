// The way back through one decoder layer on the GPU: the twin of model::LayerGradient for layers of attention and gated
// MLPs. Everything is fp32; products round their operands to TF32.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "decoder_cuda/ring.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "model/model.h"

namespace w4q::decoder_cuda {

/// Sees, in GPU memory, a linear's inputs [rows, k] and the gradients of the loss by its outputs [rows, n] …
using CudaGradientObserver =
    std::function<void(const model::PlannedLinear& linear, const float* input, const float* gradient, int64_t rows)>;
/// … and what a norm reads, [rows, its size] with heads as rows, and the gradients by the normed rows.
using CudaNormObserver =
    std::function<void(const model::PlannedNorm& norm, const float* x, const float* gradient, int64_t rows)>;

/// What decoded weights are kept in. f16 is for those that stay while other layers are looked at.
enum class Decoded { f32, f16 };

/// A linear on the GPU, decoded: [n, k], and its bias or nothing. It may still be on its way on the ring's stream.
struct DecodedLinear {
  int64_t n = 0, k = 0;
  Decoded type = Decoded::f32;
  device::DeviceBuffer matrix, bias;
};
DecodedLinear decode_linear(const kernels::LinearWeight& weight, Decoded type, UploadRing& ring);

/// A layer on the GPU, decoded.
struct DecodedLayer {
  model::LayerPlan plan;
  std::vector<DecodedLinear> linears;
  std::vector<device::DeviceBuffer> norms;
  std::vector<float> factors;  ///< of blocks: VectorRole::layer_scale
  /// Of blocks, where heads turn: cosines and sines [length, pairs].
  struct Angles {
    int64_t pairs = 0;
    device::DeviceBuffer cosines, sines;
  };
  std::vector<Angles> angles;
};
/// For sequences of `length` tokens.
DecodedLayer decode_layer(const model::LayerWeights& weights, Decoded type, int64_t length, UploadRing& ring);
/// Norms of a layer that is there, from the host.
void put_norm(DecodedLayer& layer, size_t position, std::span<const float> weights, const device::Stream& stream);

class CudaLayerGradient {
 public:
  /// Whether there is this way for all layers; the CPU's has more.
  static bool takes(const model::ModelConfig& config);

  /// Sequences of `length` tokens. `config` and `stream` must outlive it. Throws device when the memory does not suffice.
  CudaLayerGradient(const model::ModelConfig& config, int64_t length, const device::Stream& stream);
  ~CudaLayerGradient();

  /// Of a layer that is kept in f16: has its weights at hand for what follows, until another is entered.
  void enter(const DecodedLayer& layer);
  /// x [length, hidden] = layer(x), of one sequence from position 0 on.
  void forward(const DecodedLayer& layer, float* x);
  /// As model::LayerGradient::run: x stays.
  void run(const DecodedLayer& layer, const float* x, float* gradient, const CudaGradientObserver& observer,
           const CudaNormObserver& norms);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The final norm and the head, and losses behind them (model::LossGradient).
class CudaLossGradient {
 public:
  CudaLossGradient(const model::ModelConfig& config, std::span<const float> final_norm,
                   const kernels::LinearWeight& head, int64_t length, UploadRing& ring);
  ~CudaLossGradient();

  void put_norm(std::span<const float> weights);
  /// The cross entropy of ids[1], ids[2], …, summed; x [length, hidden] becomes the gradient by it.
  double run(std::span<const int32_t> ids, float* x);
  /// KL(teacher ‖ this) summed over rows; x becomes the gradient by it where `wanted`. `norms` sees the final norm.
  double run(CudaLossGradient& teacher, const float* expected, float* x, bool wanted, const CudaNormObserver& norms);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::decoder_cuda
