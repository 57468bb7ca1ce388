#include "model/architecture/rows.h"

namespace w4q::model {

/// A GGUF file of architecture "llama" is one of these where it has a window.
constinit const ArchitectureRow mistral_architecture = {.model_type = "mistral",
                                                        .class_name = "MistralForCausalLM",
                                                        .kv_heads = 8,
                                                        .max_positions = 131072,
                                                        .bos_token = 1,
                                                        .eos_token = 2,
                                                        .windows = WindowRule::all_layers,
                                                        .gguf = "llama",
                                                        .gguf_rotary_pairs = true,
                                                        .blocks = llama_blocks};

}  // namespace w4q::model
