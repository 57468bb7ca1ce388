// One decoder layer by itself: what Decoder runs in turn, and what goes through a model layer by layer with no more
// than one of them in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "core/views.h"
#include "model/layer_memory.h"
#include "model/model.h"

namespace w4q::model {

/// Sees activations as the decoder runs; what is not set costs nothing.
struct Observer {
  /// Hidden states follow transformers' convention: hidden 0 is the embeddings, hidden i the output of layer i − 1, and
  /// the last one comes after the final norm.
  std::function<void(int64_t index, MatrixView<const float> hidden)> hidden;
  /// The input of linear layers, before it is multiplied. Those that read the same input come together, by module path
  /// in model order ("model.layers.0.self_attn.q_proj", … k_proj, … v_proj). Long inputs may come in several calls, one
  /// stretch of consecutive rows each.
  std::function<void(std::span<const std::string_view> linears, MatrixView<const float> input)> linear_input;
};

/// Hidden states 0 of `ids`: row r of `out` is the embedding of ids[r], which is inside the vocabulary.
void embed(const ModelConfig& config, const kernels::LinearWeight& embeddings, std::span<const int32_t> ids,
           MatrixView<float> out);

/// What each layer adds of its own, [ids × layers · layer_embedding_size], of hidden states 0.
void embed_layers(const ModelConfig& config, const LayerEmbeddings& weights, std::span<const int32_t> ids,
                  MatrixView<const float> hidden, MatrixView<float> out);

/// The rows of the projection that are one layer's.
struct LayerProjection {
  LayerProjection(const ModelConfig& config, const LayerEmbeddings& weights, int64_t layer);
  LayerProjection(const LayerProjection&) = delete;
  LayerProjection& operator=(const LayerProjection&) = delete;

  int64_t first = 0;  ///< row
  std::vector<float> values;
  kernels::LinearWeight weight;  ///< of these values
};
/// What one layer adds of its own, [ids × layer_embedding_size].
void embed_layer(const ModelConfig& config, const LayerEmbeddings& weights, const LayerProjection& projection,
                 std::span<const int32_t> ids, MatrixView<const float> hidden, MatrixView<float> out);

class LayerDecoder;

/// Hidden states 0 of `ids` into `x`; `runner` gets what its layers add of their own, in `scratch`.
void begin_hidden(const Model& model, std::span<const int32_t> ids, LayerDecoder& runner, Floats& scratch,
                  MatrixView<float> x);

/// Some of a layer: blocks of its plan, one behind the other.
struct LayerPart {
  /// Where the run of the last one ends. At a group: once an observer has seen what the block's first one reads, or its
  /// last one; hidden states are undefined then. Mixtures are run to their end.
  enum class End { behind, at_first_group, at_last_group };

  size_t first = 0, last = 0;
  End end = End::behind;
};

/// Runs layers on hidden states; holds scratch only, the caller owns what layers remember. Not thread-safe.
class LayerDecoder {
 public:
  /// `config` must outlive it. `rope_frequencies`: see RopeTable.
  explicit LayerDecoder(const ModelConfig& config, DType rope_frequencies = DType::f32);
  ~LayerDecoder();
  LayerDecoder(LayerDecoder&&) noexcept;

  /// From now on the rows of hidden states stand at positions first … first + rows − 1.
  void set_positions(int64_t first, int64_t rows);
  /// From now on each row is the token at `position` of a sequence of its own.
  void set_step(int64_t position, int64_t rows);
  /// From now on layers with such products round their inputs to int8 (linear_int8).
  void set_int8_activations(bool on) noexcept;

  /// From now on layers add these embeddings of their own (embed_layers), one row for each row of hidden states.
  void set_layer_embeddings(MatrixView<const float> embeddings) noexcept;

  /// x = layer(x) for the rows that were set. `memory` holds the positions before and has room for these; at position 0 it
  /// is begun anew. Throws internal when the shapes do not fit.
  void run(const LayerWeights& weights, const LayerMemory& memory, MatrixView<float> x,
           const Observer* observer = nullptr);
  /// The same of some of the layer.
  void run_part(const LayerPart& part, const LayerWeights& weights, const LayerMemory& memory, MatrixView<float> x,
                const Observer* observer = nullptr);
  /// The same of a step: `memories` are those of the rows' sequences.
  void run(const LayerWeights& weights, std::span<const LayerMemory> memories, MatrixView<float> x);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::model
