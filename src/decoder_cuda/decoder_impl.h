// What a CudaDecoder holds, shared by the files that make it up: cuda_decoder.cpp (calls from outside), cuda_layers.cpp
// (the way of activations through the model), cuda_profile.cpp.
#pragma once

#include <array>

#include "decoder_cuda/cache.h"
#include "decoder_cuda/decoder.h"
#include "decoder_cuda/rope.h"
#include "device/graph.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/sampling/sampling_cuda.h"

namespace w4q::decoder_cuda {

/// Memory for a matrix.
template <class T>
device::DeviceBuffer device_matrix(const device::Context& gpu, int64_t rows, int64_t cols) {
  return device::DeviceBuffer(gpu, static_cast<size_t>(rows * cols) * sizeof(T));
}

/// Tokens that may be queued behind the one that is read.
inline constexpr size_t token_events = 8;

/// Activations of up to `rows` tokens on their way through a layer.
struct Activations {
  Activations(const device::Context& gpu, const model::ModelConfig& config, int64_t rows)
      : residual(device_matrix<float>(gpu, rows, config.hidden_size)),
        normed(device_matrix<__half>(gpu, rows, config.hidden_size)),
        qkv(device_matrix<float>(gpu, rows, (config.heads + 2 * config.kv_heads) * config.head_dim)),
        attended(device_matrix<__half>(gpu, rows, config.heads * config.head_dim)),
        gate_up(device_matrix<__half>(gpu, rows, 2 * config.intermediate_size)),
        gated(device_matrix<__half>(gpu, rows, config.intermediate_size)),
        ids(device_matrix<int32_t>(gpu, rows, 1)) {}

  device::DeviceBuffer residual, normed, qkv, attended, gate_up, gated, ids;
};

struct CudaDecoder::Impl {
  Impl(const CudaModel& model_, const CudaDecoderOptions& options_);

  void check(std::span<const int32_t> ids) const;
  void upload_ids(std::span<const int32_t> ids);
  void run_chunk(std::span<const int32_t> ids, int64_t row, const CudaObserver* observer);
  void run_layer(size_t index, int64_t rows, int64_t first, const CudaObserver* observer);
  void attend(size_t index, int64_t rows, int64_t first);
  void attend_single(size_t index, const int32_t* at, const kernels::HeadRotation& rotation);
  void attend_many(size_t index, const kernels::QkvRows& qkv, const kernels::PagedLayer& layer, int64_t first);
  kernels::NormArgs norm_args(const float* weight, int64_t rows, __half* out);
  void normalize(const device::DeviceBuffer& weight, int64_t rows);
  /// Whether the norm between two products is part of them in a step.
  bool can_fuse(const CudaLinear& from, const CudaLinear& to) const;
  /// What comes behind a layer: the next one's norm and product, or the last norm and the head.
  struct Behind {
    const CudaLinear* linear;
    const float* norm;
  };
  Behind behind(size_t layer) const;
  /// Launches of a step that do nothing but a norm.
  int64_t norm_launches() const;
  /// Adds a product to the residual stream; `next` and its weight are what normalize() and the product behind it will
  /// take, or null where something else comes first.
  void add_product(const CudaLinear& linear, const device::DeviceBuffer& x, int64_t rows, const CudaLinear* next,
                   const float* weight);
  /// What the next product needs of a norm that was part of the one before.
  InputNorm input_norm();
  void final_norm(int64_t rows, __half* out, float* out_fp32);
  void observe_hidden(int64_t index, int64_t rows, const CudaObserver* observer);
  void observe_input(const CudaLinear& linear, const device::DeviceBuffer& input, int64_t rows,
                     const CudaObserver* observer) const;
  void launch_step();
  void draw(const float* row);
  void mark_token();
  kernels::HeadRotation with_norms(kernels::HeadRotation rotation, size_t layer) const;

  const CudaModel& model;
  device::Context& gpu;
  const model::ModelConfig& config;
  const CudaDecoderOptions options;
  const int64_t chunk;
  const int64_t logit_rows;
  device::Stream stream{gpu};
  CudaCache cache;
  CudaRope rope;
  CudaMultiplier multiplier;
  Activations activations;
  device::DeviceBuffer step_cosine, step_sine;  ///< of the position of a step
  device::DeviceBuffer positions;               ///< 0, 1, 2 …: for single rows of a call
  device::DeviceBuffer kept;  ///< pages attended to [layer][key head and tile], where some are skipped
  device::DeviceBuffer hidden, logits, attention_workspace, state, wide_keys, wide_values, observed;
  device::PinnedBuffer staged_ids;
  device::PinnedBuffer drawn;  ///< tokens, written by the GPU: no copy has to be launched for them
  device::PinnedBuffer staged_state;
  int64_t hidden_rows = 0;
  int64_t position = 0;
  bool fused = false;  ///< activations.normed is what a product left, and norms[at] says what it lacks
  size_t norm_at = 0;  ///< of `norms`: the state of the residual stream as it is
  std::array<device::DeviceBuffer, 2> norms;
  bool single_row = false;  ///< the token comes from `state`, and so does its position
  kernels::SamplingOptions sampling;
  int64_t steps = 0;  ///< since start()
  device::Graph graph;
  std::array<device::Event, token_events> events;
};

}  // namespace w4q::decoder_cuda
