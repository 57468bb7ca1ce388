#include "model/architecture/rows.h"

namespace w4q::model {

constinit const ArchitectureRow llama_architecture = {.model_type = "llama",
                                                      .class_name = "LlamaForCausalLM",
                                                      .sizes = {32000, 4096, 11008, 32, 32},
                                                      .max_positions = 2048,
                                                      .bos_token = 1,
                                                      .eos_token = 2,
                                                      .attention_bias = BiasRule::stated,
                                                      .mlp_bias = BiasRule::stated,
                                                      .gguf = "llama",
                                                      .gguf_rotary_pairs = true,
                                                      .gguf_stated_biases = true,
                                                      .blocks = llama_blocks};

}  // namespace w4q::model
