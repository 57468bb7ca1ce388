#include "model/architecture/rows.h"

namespace w4q::model {

constinit const ArchitectureRow qwen2_architecture = {.model_type = "qwen2",
                                                      .class_name = "Qwen2ForCausalLM",
                                                      .kv_heads = 32,
                                                      .max_positions = 32768,
                                                      .attention_bias = BiasRule::always,
                                                      .windows = WindowRule::from_layer,
                                                      .gguf = "qwen2",
                                                      .blocks = llama_blocks};

}  // namespace w4q::model
