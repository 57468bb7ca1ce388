// What a decoder layer is made of: which linears and norms it has, in which order they run, what each reads and who
// reads it. Whatever goes over a layer (loading, decoding, calibrating, folding, converting, checking) reads it from
// here; an architecture is a row (architecture.h) that says its blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace w4q::model {

enum class Role { query, key, value, output, gate, up, down };
/// `input` and `output`: of a block, as it reads the residual stream and before it is added to it; `query` and `key`:
/// of each head.
enum class NormRole { input, output, query, key };
enum class BlockKind { attention, gated_mlp };

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
  Basis outputs = Basis::own;  ///< stream: they are added to the residual stream
  bool rotary_rows = false;    ///< rows are turned by the rotary embedding, pairs half a head apart
  size_t position = 0;         ///< among the linears of the layer
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
  int64_t window = 0;                   ///< attention: keys older than this many positions are not seen; 0: all are
  RopeConfig rope = {};                 ///< attention
  double attention_scale = 0;           ///< attention: of logits; 0: 1/√head_dim
  Activation activation = Activation::silu;  ///< gated_mlp

  const PlannedNorm* norm(NormRole role) const noexcept;
};

struct LayerPlan {
  std::vector<Block> blocks;

  /// Those of all blocks, in the order in which they run.
  std::vector<InputGroup> groups() const;
  std::vector<PlannedNorm> norms() const;
  std::vector<PlannedLinear> linears() const;
};

/// Layers may differ in everything.
LayerPlan layer_plan(const ModelConfig& config, int64_t layer);

/// layer_plan(config, layer).groups().
std::vector<InputGroup> input_groups(const ModelConfig& config, int64_t layer);

/// What stands before the layers and behind them: the embedding table, and the head that is not tied to it.
PlannedLinear embedding_plan(const ModelConfig& config);
PlannedLinear head_plan(const ModelConfig& config);

/// The norm behind the last layer.
PlannedNorm final_norm_plan(const ModelConfig& config);

/// Where a linear stands.
struct LinearPlace {
  int64_t layer = 0;
  InputGroup group;
  PlannedLinear linear;
};
/// Nothing for what is no linear of a layer.
std::optional<LinearPlace> find_linear(const ModelConfig& config, std::string_view module);

}  // namespace w4q::model
