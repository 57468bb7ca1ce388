#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_qwen2_moe(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {.shared_intermediate = "shared_expert_intermediate_size", .renormalizes = false}, config);
  leave_dense(reader, config);
}

std::vector<Block> qwen2_moe_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.shared = "mlp.shared_expert", .shared_gate = "mlp.shared_expert_gate"};
  return {attention_block(config, layer), mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow qwen2_moe_architecture = {.model_type = "qwen2_moe",
                                                          .class_name = "Qwen2MoeForCausalLM",
                                                          .kv_heads = 16,
                                                          .max_positions = 32768,
                                                          .attention_bias = BiasRule::always,
                                                          .windows = WindowRule::from_layer,
                                                          .only_experts = true,
                                                          .read = read_qwen2_moe,
                                                          .blocks = qwen2_moe_blocks};

}  // namespace w4q::model
