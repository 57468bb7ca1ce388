#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_qwen3_next(const ConfigReader& reader, ModelConfig& config) {
  read_hybrid_layers(reader, config);
  read_mixture(reader, {.shared_intermediate = "shared_expert_intermediate_size", .renormalizing = norm_topk_prob},
               config);
  leave_dense(reader, config);
}

std::vector<Block> qwen3_next_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.shared = "mlp.shared_expert", .shared_gate = "mlp.shared_expert_gate"};
  return {config.has_delta_net(layer) ? delta_net_block(config, layer, DeltaProjections::two)
                                      : attention_block(config, layer),
          mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow qwen3_next_architecture = {.model_type = "qwen3_next",
                                                           .class_name = "Qwen3NextForCausalLM",
                                                           .sizes = {151936, 2048, 5632, 48, 16},
                                                           .mixture = {512, 10, 512, 512},
                                                           .kv_heads = 2,
                                                           .head_dim = 256,
                                                           .max_positions = 32768,
                                                           .partial_rotary_factor = 0.25,
                                                           .partial_rotary = true,
                                                           .attention_bias = BiasRule::stated,
                                                           .qk_norm = true,
                                                           .norm_offset = 1,
                                                           .only_experts = true,
                                                           .gguf = "qwen3next",
                                                           .gguf_mlp_norm = "post_attention_norm",
                                                           .read = read_qwen3_next,
                                                           .blocks = qwen3_next_blocks};

}  // namespace w4q::model
