#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Three of four layers have a gated delta net.
void read_qwen3_5(const ConfigReader& reader, ModelConfig& config) { read_hybrid_layers(reader, config); }

void read_qwen3_5_moe(const ConfigReader& reader, ModelConfig& config) {
  read_qwen3_5(reader, config);
  read_mixture(reader, {.shared_intermediate = "shared_expert_intermediate_size"}, config);
  config.mixture.storage = ExpertStorage::stacked_halves;
}

std::vector<Block> qwen3_5_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.shared = "mlp.shared_expert", .shared_gate = "mlp.shared_expert_gate"};
  return {config.has_delta_net(layer) ? delta_net_block(config, layer, DeltaProjections::four)
                                      : attention_block(config, layer),
          mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow qwen3_5_architecture = {.model_type = "qwen3_5_text",
                                                        .class_name = "Qwen3_5ForCausalLM",
                                                        .wrappers = {"Qwen3_5ForConditionalGeneration"},
                                                        .sizes = {248320, 4096, 12288, 32, 16},
                                                        .kv_heads = 4,
                                                        .head_dim = 256,
                                                        .max_positions = 32768,
                                                        .partial_rotary_factor = 0.25,
                                                        .partial_rotary = true,
                                                        .attention_bias = BiasRule::stated,
                                                        .qk_norm = true,
                                                        .norm_offset = 1,
                                                        .text_mrope = true,
                                                        .gguf = "qwen35",
                                                        .gguf_mlp_norm = "post_attention_norm",
                                                        .read = read_qwen3_5,
                                                        .blocks = qwen3_5_blocks};

constinit const ArchitectureRow qwen3_5_moe_architecture = {.model_type = "qwen3_5_moe_text",
                                                            .class_name = "Qwen3_5MoeForCausalLM",
                                                            .wrappers = {"Qwen3_5MoeForConditionalGeneration"},
                                                            .sizes = {248320, 2048, 0, 40, 16},
                                                            .mixture = {256, 8, 512, 512},
                                                            .kv_heads = 2,
                                                            .head_dim = 256,
                                                            .max_positions = 32768,
                                                            .partial_rotary_factor = 0.25,
                                                            .partial_rotary = true,
                                                            .attention_bias = BiasRule::stated,
                                                            .qk_norm = true,
                                                            .norm_offset = 1,
                                                            .only_experts = true,
                                                            .text_mrope = true,
                                                            .gguf = "qwen35moe",
                                                            .gguf_mlp_norm = "post_attention_norm",
                                                            .read = read_qwen3_5_moe,
                                                            .blocks = qwen3_5_blocks};

}  // namespace w4q::model
