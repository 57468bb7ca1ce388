// The blocks of which layers of several architectures are made; a row changes what it does otherwise.
#pragma once

#include "model/layer_plan.h"

namespace w4q::model {

/// Names in a layer: "model.layers.3." and "blk.3." before the module's own.
struct LayerNames {
  explicit LayerNames(int64_t layer);
  PlannedNorm norm(const ModelConfig& config, NormRole role, std::string_view name, std::string_view gguf) const;
  PlannedLinear linear(Role role, std::string_view name, std::string_view gguf, int64_t n, int64_t k, bool bias) const;

  std::string prefix, gguf_prefix;
};

/// q, k, v of input_layernorm, rotary embedding, o.
Block attention_block(const ModelConfig& config, int64_t layer);
/// down of act(gate) · up of post_attention_layernorm.
Block gated_mlp_block(const ModelConfig& config, int64_t layer);
/// The two one after the other.
std::vector<Block> llama_blocks(const ModelConfig& config, int64_t layer);

}  // namespace w4q::model
