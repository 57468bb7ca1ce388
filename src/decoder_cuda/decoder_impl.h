// What a CudaDecoder holds, shared by the files that make it up: decoder.cpp (calls from outside), layers.cpp (the way of
// activations through the model), profile.cpp.
#pragma once

#include <array>

#include "decoder_cuda/attention.h"
#include "decoder_cuda/cache.h"
#include "decoder_cuda/decoder.h"
#include "decoder_cuda/layer_runner.h"
#include "decoder_cuda/rope.h"
#include "device/graph.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/sampling/sampling_cuda.h"

namespace w4q::decoder_cuda {

/// Tokens that may be queued behind the one that is read.
inline constexpr size_t token_events = 8;

struct CudaDecoder::Impl {
  Impl(const CudaModel& model_, const CudaDecoderOptions& options_);

  void upload_ids(std::span<const int32_t> ids);
  /// Checks `ids` and makes room for them.
  void begin_call(std::span<const int32_t> ids);
  void end_call(int64_t rows);
  void run_chunk(std::span<const int32_t> ids, int64_t row, const CudaObserver* observer);
  /// The same of one stage: `states` in fp32 on the host are what its layers read, and what they leave.
  void run_chunk_of_stage(std::span<const int32_t> ids, int64_t row, MatrixView<float> states,
                          const model::LayerStage& stage);
  /// Runs all layers on `rows` rows that stand at positions `first` and on.
  void run_layers(int64_t rows, int64_t first, const CudaObserver* observer);
  void attend(size_t index, const CudaBlock& block, int64_t rows, int64_t first);
  /// The keys and values that a layer reads.
  kernels::PagedLayer keys_of(size_t layer, const CudaBlock& block) {
    return cache.layer(static_cast<size_t>(block.plan.attention.keys_of.value_or(static_cast<int64_t>(layer))));
  }
  kernels::DeltaMemory delta_memory(size_t layer, const kernels::DeltaShape& shape);
  void attend_single(size_t index, const CudaBlock& block, const SequenceRows& rows, const int32_t* at);
  /// f16 pages of the first `length` positions.
  kernels::PagedLayer widen(const kernels::PagedLayer& layer, int64_t length);
  /// What comes behind a layer: the next one's first block, or the last norm and the head.
  NormBetween behind(size_t layer) const;
  /// Launches of a step that do nothing but a norm.
  int64_t norm_launches() const;
  void embed(const int32_t* ids, int64_t rows, bool overlap, const kernels::AngleRow& angles);
  void final_norm(__half* out, float* out_fp32);
  /// What the model does to logits behind the head.
  void finish_logits(int64_t rows);
  void observe_hidden(int64_t index, int64_t rows, const CudaObserver* observer);
  void launch_step();
  void draw(const float* row);
  void mark_token();

  const CudaModel& model;
  device::Context& gpu;
  const model::ModelConfig& config;
  const CudaDecoderOptions options;
  const int64_t chunk;
  const int64_t logit_rows;
  device::Stream stream{gpu};
  std::vector<device::DeviceBuffer> delta;  ///< each layer's history and state; empty where it has none
  bool graphs = true;                       ///< a step needs no host
  CudaCache cache;
  CudaRopes ropes;
  LayerRunner runner;
  device::DeviceBuffer residual, ids_on_gpu;
  device::DeviceBuffer projected, layer_embeddings;  ///< f32 [rows × layers · layer_embedding_size]
  device::DeviceBuffer step_cosine, step_sine;       ///< of the position of a step
  device::DeviceBuffer positions;                    ///< 0, 1, 2 …: for single rows of a call
  device::DeviceBuffer kept;  ///< pages attended to [layer][key head and tile], where some are skipped
  device::DeviceBuffer hidden, logits, attention_workspace, state, wide_keys, wide_values, observed;
  device::PinnedBuffer staged_ids;
  device::PinnedBuffer drawn;  ///< tokens, written by the GPU: no copy has to be launched for them
  device::PinnedBuffer staged_state;
  int64_t hidden_rows = 0;
  int64_t position = 0;
  bool single_row = false;  ///< the token comes from `state`, and so does its position
  kernels::SamplingOptions sampling;
  int64_t steps = 0;  ///< since start()
  device::Graph graph;
  std::array<device::Event, token_events> events;
};

}  // namespace w4q::decoder_cuda
