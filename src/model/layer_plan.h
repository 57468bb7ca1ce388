// What a decoder layer is made of: which linears and norms it has, in which order they run, what each reads and who
// reads it. Whatever goes over a layer (loading, decoding, calibrating, folding, converting, checking) reads it from
// here; an architecture is a row (architecture.h) that says its blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "model/config.h"

namespace w4q::model {

enum class Role {
  query,  ///< with AttentionConfig::output_gate each head's gates behind its queries
  key,
  value,
  query_key_value,  ///< the three as one matrix
  output,
  gate,
  up,
  gate_up,  ///< the two as one matrix, ExpertStorage
  down,
  router,
  shared_gate,  ///< one row: the share of what every token goes through
  // Of a gated delta net: queries, keys and values; gates of its output; how fast it learns; how fast it forgets.
  delta_mixed,
  delta_gate,
  delta_beta,
  delta_decay,
  delta_mixed_gate,  ///< mixed and gate as one matrix, key head by key head
  delta_beta_decay,  ///< likewise
  layer_gate,
  layer_output,
};
/// `input` and `output`: of a block, as it reads the residual stream and before it is added to it; `query` and `key`:
/// of each head, or of all as one; `delta`: of each head of a delta net; the rest where experts and a dense MLP stand
/// beside each other: before the experts, and behind each of the two.
enum class NormRole { input, output, query, key, delta, expert_input, expert_output, dense_output };
enum class BlockKind { attention, delta_net, gated_mlp, mixture, layer_embedding };
/// Parameters that are neither linears nor norms.
enum class VectorRole {
  sinks,         ///< [heads]
  convolution,   ///< [channels, 1, taps]
  decay,         ///< [value_heads], log: A_log
  step_bias,     ///< [value_heads]: dt_bias
  correction,    ///< [experts]: added to scores for the choice alone
  expert_scale,  ///< [experts]: of shares
  router_scale,  ///< [hidden]: of the router's normed input
  layer_scale,   ///< [1]: of the residual stream behind the block
};

/// The basis in which channels stand, by what a rotation would have to be folded into (fold_rotations.h).
enum class Basis {
  own,     ///< what lies between two products minds the basis: nothing is folded
  stream,  ///< of the residual stream
  heads,   ///< of the values of each head
};

/// RMSNorm: y = x̂ · (w + offset).
struct PlannedNorm {
  NormRole role = NormRole::input;
  std::string name = {};  ///< module path: "model.layers.0.input_layernorm"
  std::string gguf = {};  ///< "blk.0.attn_norm"
  int64_t size = 0;
  float offset = 0;     ///< added to the stored weight: 1 where checkpoints keep what norms differ from 1 by
  size_t position = 0;  ///< among the norms of the layer
};

struct PlannedLinear {
  Role role = Role::query;
  std::string name = {};  ///< module path: "model.layers.0.self_attn.q_proj"
  std::string gguf = {};  ///< "blk.0.attn_q"
  int64_t n = 0, k = 0;
  bool bias = false;
  /// Where biases of several linears stand in one tensor, that and the row in it.
  std::string bias_tensor = {};
  int64_t bias_row = 0;
  /// Experts are one tensor in GGUF, of which this is the part; negative: it is a tensor by itself.
  int64_t gguf_part = -1;
  Basis outputs = Basis::own;  ///< stream: they are added to the residual stream
  bool rotary_rows = false;    ///< rows are turned by the rotary embedding, pairs half a head apart
  size_t position = 0;         ///< among the linears of the layer
};

struct PlannedVector {
  VectorRole role = VectorRole::sinks;
  std::string name = {};  ///< of the tensor
  std::string gguf = {};  ///< "blk.0.exp_probs_b.bias"; empty: GGUF has none
  Shape shape = {};
  size_t position = 0;  ///< among the vectors of the layer
};

/// Linears that read the same input.
struct InputGroup {
  std::vector<PlannedLinear> linears = {};  ///< in model order; the first one names the group
  int64_t width = 0;                        ///< channels of the input
  Basis inputs = Basis::own;
  std::optional<PlannedNorm> norm = {};  ///< that the input comes from
  /// Else the linear whose outputs the channels are, up to a factor of each row: its rows may be scaled for them.
  std::string producer = {};
  /// Where heads of `head_dim` channels share the producer's, so many in turn; 0: each channel has one of its own.
  int64_t head_dim = 0, heads_per_producer = 1;
  std::optional<int64_t> expert = {};  ///< of a mixture: rows that the router sends to this one

  const std::string& name() const noexcept { return linears.front().name; }
  std::vector<std::string> names() const;
  /// The output of `producer` that input channel `channel` is.
  int64_t producer_channel(int64_t channel) const noexcept;
};

/// What is added to the residual stream as one: x += output_norm(block(input_norm(x))).
struct Block {
  BlockKind kind = BlockKind::attention;
  std::vector<PlannedNorm> norms = {};
  std::vector<InputGroup> groups = {};  ///< in the order in which they run
  std::vector<PlannedVector> vectors = {};
  AttentionConfig attention = {};
  kernels::DeltaShape delta = {};
  kernels::Gating gating = {};
  ExpertStorage storage = ExpertStorage::by_name;  ///< how gates and ups stand
  MixtureConfig mixture = {};  ///< its groups: router, those of each expert's inputs and outputs in turn, then shared
  double output_scale = 1;     ///< of what is added

  const PlannedNorm* norm(NormRole role) const noexcept;
  const PlannedVector* vector(VectorRole role) const noexcept;
};

struct LayerPlan {
  std::vector<Block> blocks;

  /// Those of all blocks, in the order in which they run.
  std::vector<InputGroup> groups() const;
  std::vector<PlannedNorm> norms() const;
  std::vector<PlannedLinear> linears() const;
  std::vector<PlannedVector> vectors() const;
};

/// Layers may differ in everything.
LayerPlan layer_plan(const ModelConfig& config, int64_t layer);

/// layer_plan(config, layer).groups().
std::vector<InputGroup> input_groups(const ModelConfig& config, int64_t layer);

/// Whether all layers are attention with q, k and v, and an MLP with gate and up, of one matrix each.
bool has_dense_layers(const ModelConfig& config);

/// What stands before the layers and behind them: the embedding table, and the head that is not tied to it.
PlannedLinear embedding_plan(const ModelConfig& config);
PlannedLinear head_plan(const ModelConfig& config);

/// Where layers have embeddings of their own: one table for all, and what the residual stream adds to them.
PlannedLinear layer_embedding_plan(const ModelConfig& config);
PlannedLinear layer_projection_plan(const ModelConfig& config);
PlannedNorm layer_projection_norm_plan(const ModelConfig& config);

/// The norm behind the last layer.
PlannedNorm final_norm_plan(const ModelConfig& config);
/// That and those of all layers.
std::vector<PlannedNorm> all_norms(const ModelConfig& config);

/// Where a linear stands.
struct LinearPlace {
  int64_t layer = 0;
  InputGroup group;
  PlannedLinear linear;
};
/// Nothing for what is no linear of a layer.
std::optional<LinearPlace> find_linear(const ModelConfig& config, std::string_view module);

}  // namespace w4q::model
