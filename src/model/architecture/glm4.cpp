#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_glm4(const ConfigReader&, ModelConfig& config) {
  config.rope.neighbours = true;
  config.output_bias = false;  // attention_bias is of q, k and v
}

void read_glm4v(const ConfigReader&, ModelConfig& config) {
  config.rope.neighbours = true;
  config.qkv_bias = true;
}

std::vector<Block> glm_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), fused_mlp_block(config, layer)};
}

/// Norms before and behind both blocks.
std::vector<Block> glm4_blocks(const ModelConfig& config, int64_t layer) {
  return {with_output_norm(attention_block(config, layer), config, layer, "post_self_attn_layernorm"),
          with_output_norm(fused_mlp_block(config, layer), config, layer, "post_mlp_layernorm")};
}

}  // namespace

constinit const ArchitectureRow glm4_architecture = {.model_type = "glm4",
                                                     .class_name = "Glm4ForCausalLM",
                                                     .sizes = {151552, 4096, 13696, 40, 32},
                                                     .kv_heads = 2,
                                                     .head_dim = 128,
                                                     .max_positions = 131072,
                                                     .partial_rotary_factor = 0.5,
                                                     .partial_rotary = true,
                                                     .rms_norm_eps = 1.5625e-7,
                                                     .biases_attention = true,
                                                     .attention_bias = BiasRule::stated,
                                                     .gguf = "glm4",
                                                     .read = read_glm4,
                                                     .blocks = glm4_blocks};

constinit const ArchitectureRow glm_architecture = {.model_type = "glm",
                                                    .class_name = "GlmForCausalLM",
                                                    .sizes = {151552, 4096, 13696, 40, 32},
                                                    .kv_heads = 2,
                                                    .head_dim = 128,
                                                    .max_positions = 131072,
                                                    .partial_rotary_factor = 0.5,
                                                    .partial_rotary = true,
                                                    .rms_norm_eps = 1.5625e-7,
                                                    .biases_attention = true,
                                                    .attention_bias = BiasRule::stated,
                                                    .gguf = "chatglm",
                                                    .read = read_glm4,
                                                    .blocks = glm_blocks};

/// The text model of one that sees: as GLM-4.
constinit const ArchitectureRow glm4v_architecture = {
    .model_type = "glm4v_text",
    .class_name = "Glm4vTextModel",
    .wrappers = {"Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"},
    .sizes = {151552, 4096, 13696, 40, 32},
    .kv_heads = 2,
    .max_positions = 32768,
    .partial_rotary = true,
    .rms_norm_eps = 1e-5,
    .text_mrope = true,
    .gguf = "glm4",
    .read = read_glm4v,
    .blocks = glm4_blocks};

}  // namespace w4q::model
