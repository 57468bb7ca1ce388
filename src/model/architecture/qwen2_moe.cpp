#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Of the first layers every other one has a window.
void read_windows(const ConfigReader& reader, ModelConfig& config) {
  const bool slides = reader.boolean("use_sliding_window").value_or(false);
  const int64_t end = reader.integer("max_window_layers").value_or(28);
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [&](int64_t layer) {
    return slides && layer % 2 == 0 && layer < end ? sliding_attention : full_attention;
  });
  if (slides) set_windows(reader, types, config.architecture->window, config);
}

void read_qwen2_moe(const ConfigReader& reader, ModelConfig& config) {
  read_windows(reader, config);
  config.qkv_bias = reader.boolean("qkv_bias").value_or(true);
  read_mixture(reader,
               {.shared_intermediate = "shared_expert_intermediate_size",
                .renormalizing = norm_topk_prob,
                .renormalizes = false},
               config);
  leave_dense(reader, config);
}

std::vector<Block> qwen2_moe_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.shared = "mlp.shared_expert", .shared_gate = "mlp.shared_expert_gate"};
  return {attention_block(config, layer), mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow qwen2_moe_architecture = {.model_type = "qwen2_moe",
                                                          .class_name = "Qwen2MoeForCausalLM",
                                                          .sizes = {151936, 2048, 5632, 24, 16},
                                                          .mixture = {60, 4, 1408, 5632},
                                                          .kv_heads = 16,
                                                          .max_positions = 32768,

                                                          .only_experts = true,
                                                          .gguf = "qwen2moe",
                                                          .read = read_qwen2_moe,
                                                          .blocks = qwen2_moe_blocks};

}  // namespace w4q::model
