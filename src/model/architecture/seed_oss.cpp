#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_seed_oss(const ConfigReader& reader, ModelConfig& config) {
  config.output_bias = reader.boolean("attention_out_bias").value_or(false);
}

}  // namespace

constinit const ArchitectureRow seed_oss_architecture = {.model_type = "seed_oss",
                                                         .class_name = "SeedOssForCausalLM",
                                                         .sizes = {155136, 4096, 27648, 64, 80},
                                                         .kv_heads = 8,
                                                         .head_dim = 128,
                                                         .max_positions = 524288,
                                                         .biases_attention = true,
                                                         .bos_token = 0,
                                                         .eos_token = 2,
                                                         .attention_bias = BiasRule::stated,
                                                         .mlp_bias = BiasRule::stated,
                                                         .gguf = "seed_oss",
                                                         .gguf_mlp_norm = "post_attention_norm",
                                                         .read = read_seed_oss,
                                                         .blocks = llama_blocks};

}  // namespace w4q::model
