#include "model/architecture/rows.h"

namespace w4q::model {

constinit const ArchitectureRow qwen3_architecture = {.model_type = "qwen3",
                                                      .class_name = "Qwen3ForCausalLM",
                                                      .sizes = {151936, 4096, 22016, 32, 32},
                                                      .kv_heads = 32,
                                                      .head_dim = 128,
                                                      .max_positions = 32768,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .windows = WindowRule::from_layer,
                                                      .gguf = "qwen3",
                                                      .blocks = llama_blocks};

}  // namespace w4q::model
