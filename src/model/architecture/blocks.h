// The blocks of which layers of several architectures are made; a row changes what it does otherwise.
#pragma once

#include "model/layer_plan.h"

namespace w4q::model {

/// Names in a layer: "model.layers.3." and "blk.3." before the module's own.
struct LayerNames {
  LayerNames(const ModelConfig& config, int64_t layer);
  PlannedNorm norm(const ModelConfig& config, NormRole role, std::string_view name, std::string_view gguf = {}) const;
  PlannedLinear linear(Role role, std::string_view name, std::string_view gguf, int64_t n, int64_t k, bool bias) const;
  PlannedVector vector(VectorRole role, std::string_view name, Shape shape, std::string_view gguf = {}) const;

  std::string prefix, gguf_prefix;
};

/// How a mixture's modules are called, behind "model.layers.3.".
struct MixtureNames {
  std::string_view router = "mlp.gate";
  std::string_view correction = {};  ///< tensor; empty: there is none
  bool wide_correction = false;      ///< it is [1, experts]
  std::string_view experts = "mlp.experts";
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
  std::string_view stacked_inputs = "mlp.experts.gate_up_proj", stacked_outputs = "mlp.experts.down_proj";
  std::string_view shared = {};             ///< what every token goes through; empty: nothing
  std::string_view gguf_shared = "_shexp";  ///< behind its names in GGUF
  std::string_view shared_gate = {};
  bool bias = false;  ///< of the router and of experts, which are stacked
};

/// q, k, v of input_layernorm, rotary embedding, o: as ModelConfig::attention_of says.
Block attention_block(const ModelConfig& config, int64_t layer);
/// The same with q, k and v as one matrix: self_attn.qkv_proj.
Block fused_attention_block(const ModelConfig& config, int64_t layer);
/// down of act(gate) · up of post_attention_layernorm.
Block gated_mlp_block(const ModelConfig& config, int64_t layer);
/// The same with gate and up as one matrix: mlp.gate_up_proj.
Block fused_mlp_block(const ModelConfig& config, int64_t layer);
/// Experts, and what is shared, of post_attention_layernorm.
Block mixture_block(const ModelConfig& config, int64_t layer, const MixtureNames& names);
/// Of a layer that has a mixture that one, of another gated_mlp_block.
Block mixture_or_mlp_block(const ModelConfig& config, int64_t layer, const MixtureNames& names);
/// Where the projections of a gated delta net are four matrices, or two.
enum class DeltaProjections { four, two };
Block delta_net_block(const ModelConfig& config, int64_t layer, DeltaProjections projections);
/// Attention and MLP one after the other.
std::vector<Block> llama_blocks(const ModelConfig& config, int64_t layer);

/// `block` with a norm of what it adds.
Block with_output_norm(Block block, const ModelConfig& config, int64_t layer, std::string_view name);
/// `block` with its norm in another place's name; empty: it reads the residual stream as it is.
Block with_input_norm(Block block, const ModelConfig& config, int64_t layer, std::string_view name);

}  // namespace w4q::model
