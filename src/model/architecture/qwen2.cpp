#include "model/architecture/rows.h"

namespace w4q::model {

constinit const ArchitectureRow qwen2_architecture = {.model_type = "qwen2",
                                                      .class_name = "Qwen2ForCausalLM",
                                                      .sizes = {151936, 4096, 22016, 32, 32},
                                                      .kv_heads = 32,
                                                      .max_positions = 32768,
                                                      .attention_bias = BiasRule::always,
                                                      .windows = WindowRule::from_layer,
                                                      .gguf = "qwen2",
                                                      .blocks = llama_blocks};

/// The text models of those that see: as Qwen2.
constinit const ArchitectureRow qwen2_vl_architecture = {.model_type = "qwen2_vl_text",
                                                         .class_name = "Qwen2VLTextModel",
                                                         .wrappers = {"Qwen2VLForConditionalGeneration"},
                                                         .sizes = {152064, 8192, 29568, 80, 64},
                                                         .kv_heads = 8,
                                                         .max_positions = 32768,
                                                         .rope_theta = 1e6,
                                                         .rms_norm_eps = 1e-5,
                                                         .attention_bias = BiasRule::always,
                                                         .windows = WindowRule::from_layer,
                                                         .text_mrope = true,
                                                         .gguf = "qwen2vl",
                                                         .blocks = llama_blocks};

constinit const ArchitectureRow qwen2_5_vl_architecture = {.model_type = "qwen2_5_vl_text",
                                                           .class_name = "Qwen2_5_VLTextModel",
                                                           .wrappers = {"Qwen2_5_VLForConditionalGeneration"},
                                                           .sizes = {152064, 8192, 29568, 80, 64},
                                                           .kv_heads = 8,
                                                           .max_positions = 32768,
                                                           .rope_theta = 1e6,
                                                           .rms_norm_eps = 1e-5,
                                                           .attention_bias = BiasRule::always,
                                                           .windows = WindowRule::from_layer,
                                                           .text_mrope = true,
                                                           .gguf = "qwen2vl",
                                                           .blocks = llama_blocks};

}  // namespace w4q::model
