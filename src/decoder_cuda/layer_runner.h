// The way of activations through layers on the GPU: block after block, whatever attends. With a single row, norms are part
// of the products around them where kernels can (kernels/frame/linear_fusion.h).
#pragma once

#include <array>
#include <functional>
#include <span>

#include "decoder_cuda/decoder.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/model.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/elementwise/elementwise_cuda.h"

namespace w4q::decoder_cuda {

/// Memory for a matrix.
template <class T>
device::DeviceBuffer device_matrix(const device::Context& gpu, int64_t rows, int64_t cols) {
  return device::DeviceBuffer(gpu, static_cast<size_t>(rows * cols) * sizeof(T));
}

/// Activations of up to `rows` tokens on their way through a block of any of `layers`.
struct Activations {
  /// `usual`: usual_attention().
  Activations(const device::Context& gpu, const model::ModelConfig& config, const model::AttentionConfig& usual,
              std::span<const CudaLayer> layers, int64_t rows);

  device::DeviceBuffer normed;          ///< f16: what a block's first group reads
  device::DeviceBuffer qkv, attended;   ///< f32, f16: attention, delta nets
  device::DeviceBuffer arranged;        ///< f32: heads that attention does not take as products leave them
  device::DeviceBuffer split, gates;    ///< f32: queries, keys and values, and gates of attention that has them
  device::DeviceBuffer mixed;           ///< f32: scratch of a delta net
  device::DeviceBuffer routed, shared;  ///< f32: a router's products; what every row goes through, in a mixture
  device::DeviceBuffer parts;           ///< f32: a router's products of a single row, of 64 inputs each
  device::DeviceBuffer gate_up, gated;  ///< f16: gated MLP
  device::DeviceBuffer both;            ///< f32: gates and ups that no product takes over
  device::DeviceBuffer added;           ///< f32: what is normed or scaled before it is added to the residual stream
  device::DeviceBuffer routing, expert_input;  ///< f16: of mixtures with norms of their own
  device::DeviceBuffer experts;                ///< f32: what those add
};

struct LayerRunnerOptions {
  int64_t rows = 1;                                              ///< most rows that pass through a layer together
  int64_t product_rows = 1;                                      ///< most rows of a product, at least `rows`
  bool fuse = false, overlap = false, int8_activations = false;  ///< as CudaDecoderOptions
};

struct LayerRunner {
  /// Makes activations.attended of activations.qkv.
  using Attend = std::function<void(const CudaBlock& block)>;

  /// `linears`: all that are multiplied, in the order of a step. Everything must outlive it. Throws unsupported for
  /// blocks that only the CPU decodes.
  LayerRunner(const model::ModelConfig& config_, std::span<const CudaLayer> layers,
              std::span<const CudaLinear* const> linears, const LayerRunnerOptions& options_,
              const device::Stream& stream_);

  /// From here on the residual stream is `x` [rows × hidden], fp32.
  void begin(float* x, int64_t count) noexcept { residual = x, rows = count, fused = in_parts = false, pending = {}; }
  /// x = layer(x). `behind`: what reads the stream next, as far as it does right then.
  void run(const CudaLayer& layer, const Attend& attend, const CudaObserver* observer, const NormBetween& behind);

  void run_mixture(const CudaBlock& block, const CudaObserver* observer, const NormBetween& next);
  void run_block(const CudaBlock& block, const Attend& attend, const CudaObserver* observer, const NormBetween& next);
  /// Of the residual stream, with what is pending.
  kernels::NormArgs norm_args(const float* weight, __half* out);
  /// What a block's first group reads, unless the product before it left that already; without a weight the residual
  /// stream as it is.
  void normalize(const float* weight);
  void normalize_to(const float* weight, __half* out);
  /// gated = activation(gate) · up of products of `x`.
  void multiply_gated(const model::Block& plan, const CudaLinear& linear, const __half* x, InputNorm norm);
  /// The shared part of a mixture, into activations.shared.
  void run_shared(const CudaBlock& block, const InputNorm& norm, const CudaObserver* observer);
  /// residual += what experts and the shared part add, each normed, and then both.
  void add_mixture(const CudaBlock& block, const float* gate);
  /// What a layer's own embedding adds: activations.gated of activations.qkv.
  void embed_layer(const CudaBlock& block);
  /// residual += what the block says of activations.added.
  void add_apart(const CudaBlock& block);
  /// Adds a product to the residual stream; `next` is what normalize() and the product behind it will take.
  void add_product(const CudaBlock& block, const device::DeviceBuffer& x, const NormBetween& next);
  /// Whether the norm behind a block is part of its last product in a step.
  bool can_fuse(const CudaBlock& from, const NormBetween& next) const;
  /// What that product leaves, which the next one will take.
  NextNorm leave_norm(const NormBetween& next);
  /// What the next product needs of a norm that was part of the one before.
  InputNorm input_norm();
  /// Whether the observer has seen enough.
  bool observe(const CudaLinear& linear, const device::DeviceBuffer& input, const CudaObserver* observer) const;

  const model::ModelConfig& config;
  const model::AttentionConfig usual;  ///< usual_attention(): whose angles a step lays out
  const LayerRunnerOptions options;
  const device::Stream& stream;
  CudaMultiplier multiplier;
  Activations activations;
  std::optional<MixtureScratch> mixtures;
  /// Whether the launches of what runs now may begin while those before still run.
  bool step_overlaps() const noexcept { return options.overlap && rows == 1; }

  float* residual = nullptr;
  /// Where layers have some of their own: [rows × layers · layer_embedding_size], or those of the present layer alone.
  const float* layer_embeddings = nullptr;
  bool of_present_layer = false;
  int64_t rows = 0;
  kernels::PendingSum pending = {};  ///< of one row: what the next norm adds to the residual stream first
  bool fused = false;                ///< activations.normed is what a product left, and norms[at] says what it lacks
  bool in_parts = false;             ///< activations.parts is what that product made of it for the router
  size_t norm_at = 0;                ///< of `norms`: the state of the residual stream as it is
  std::array<device::DeviceBuffer, 2> norms;
};

/// Whether what a block adds to the residual stream is normed or scaled before.
bool adds_apart(const model::Block& block);
/// Whether all blocks are those of a plain dense decoder, whose parts can be timed one by one.
bool has_plain_blocks(const model::ModelConfig& config);

/// Attention whose queries come with gates: splits activations.qkv into queries, keys and values side by side, and gates.
/// Returns what attention reads; others' queries stand as they are.
float* split_gates(LayerRunner& runner, const CudaBlock& block);
/// Multiplies activations.attended with those gates.
void apply_gates(LayerRunner& runner, const CudaBlock& block);
/// A delta net on `count` rows from row `first`, of one sequence: activations.attended of activations.qkv.
void run_delta_net(LayerRunner& runner, const CudaBlock& block, const kernels::DeltaMemory& memory, bool begins,
                   int64_t first, int64_t count);

/// `rotation` with the norms of the block's heads.
kernels::HeadRotation with_norms(kernels::HeadRotation rotation, const CudaBlock& block,
                                 const model::ModelConfig& config);

}  // namespace w4q::decoder_cuda
