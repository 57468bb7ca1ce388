// What lies between a block's first product and its attention: heads that the attention kernels normalize and turn by
// themselves, and others, which one launch more brings into the form that they read.
#pragma once

#include "decoder_cuda/layer_runner.h"
#include "decoder_cuda/rope.h"

namespace w4q::decoder_cuda {

/// Attention that the fast kernels leave: soft caps, heads of more than 256 values, keys of another layer.
bool attends_plainly(const model::AttentionConfig& attention);

/// The attention whose angles a step lays out for all layers: of the first layer that has any.
model::AttentionConfig usual_attention(const model::ModelConfig& config);

/// Whether a block's heads are as the attention kernels take them from the product, with the angles of `usual`.
bool has_usual_heads(const model::Block& block, const model::AttentionConfig& usual);

/// Rows of one sequence among those that a runner has.
struct SequenceRows {
  int64_t row = 0, count = 1;         ///< of the runner's rows
  int64_t first = 0;                  ///< the position of the first
  const int32_t* position = nullptr;  ///< of a step: in GPU memory, instead
  float* products = nullptr;          ///< of all of the runner's rows, as split_gates leaves them
};

/// Attention on rows whose angles are `rotation`: activations.attended of activations.qkv. Keys and values are stored on
/// the pages of `layer`, or those of another layer that it reads, first. `widen` makes f16 pages of others. Several rows.
using Widen = std::function<kernels::PagedLayer(const kernels::PagedLayer& layer, int64_t length)>;
void attend_rows(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows,
                 const kernels::HeadRotation& rotation, const kernels::PagedLayer& layer, const Widen& widen);

/// The same of a single row that the fast kernel does not take as it is, or plainly: what it stores, or `args` complete.
/// True where `args` are now for decode_attention_cuda.
bool arrange_step(LayerRunner& runner, const CudaBlock& block, const SequenceRows& rows,
                  const kernels::HeadRotation& rotation, kernels::DecodeAttentionArgs& args);

}  // namespace w4q::decoder_cuda
