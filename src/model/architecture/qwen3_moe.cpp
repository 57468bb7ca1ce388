#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_qwen3_moe(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {.renormalizing = norm_topk_prob, .renormalizes = false}, config);
  leave_dense(reader, config);
}

void read_qwen3_vl_moe(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {}, config);
  leave_dense(reader, config);
  config.mixture.storage = ExpertStorage::stacked_halves;
}

std::vector<Block> qwen3_moe_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), mixture_or_mlp_block(config, layer, {})};
}

}  // namespace

constinit const ArchitectureRow qwen3_moe_architecture = {.model_type = "qwen3_moe",
                                                          .class_name = "Qwen3MoeForCausalLM",
                                                          .sizes = {151936, 2048, 6144, 24, 32},
                                                          .mixture = {128, 8, 768},
                                                          .kv_heads = 4,
                                                          .max_positions = 32768,
                                                          .attention_bias = BiasRule::stated,
                                                          .qk_norm = true,
                                                          .windows = WindowRule::switched,
                                                          .only_experts = true,
                                                          .gguf = "qwen3moe",
                                                          .read = read_qwen3_moe,
                                                          .blocks = qwen3_moe_blocks};

/// The text model of one that sees: as Qwen3.
constinit const ArchitectureRow qwen3_vl_architecture = {.model_type = "qwen3_vl_text",
                                                         .class_name = "Qwen3VLTextModel",
                                                         .wrappers = {"Qwen3VLForConditionalGeneration"},
                                                         .sizes = {151936, 4096, 22016, 32, 32},
                                                         .kv_heads = 32,
                                                         .head_dim = 128,
                                                         .max_positions = 128000,
                                                         .rope_theta = 5e5,
                                                         .attention_bias = BiasRule::stated,
                                                         .qk_norm = true,
                                                         .text_mrope = true,
                                                         .gguf = "qwen3vl",
                                                         .blocks = llama_blocks};

constinit const ArchitectureRow qwen3_vl_moe_architecture = {.model_type = "qwen3_vl_moe_text",
                                                             .class_name = "Qwen3VLMoeTextModel",
                                                             .wrappers = {"Qwen3VLMoeForConditionalGeneration"},
                                                             .sizes = {151936, 2048, 5632, 24, 16},
                                                             .mixture = {60, 4, 1408},
                                                             .kv_heads = 16,
                                                             .max_positions = 128000,
                                                             .rope_theta = 5e5,
                                                             .attention_bias = BiasRule::stated,
                                                             .qk_norm = true,
                                                             .only_experts = true,
                                                             .text_mrope = true,
                                                             .gguf = "qwen3vlmoe",
                                                             .read = read_qwen3_vl_moe,
                                                             .blocks = qwen3_moe_blocks};

}  // namespace w4q::model
