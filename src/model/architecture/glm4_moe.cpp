#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Dense layers first; experts in groups, of which the best are asked.
void read_groups(const ConfigReader& reader, ModelConfig& config, int64_t usually_dense) {
  read_mixture(reader, {.experts = "n_routed_experts", .renormalizing = norm_topk_prob}, config);
  MixtureConfig& mixture = config.mixture;
  mixture.scoring = Scoring::sigmoid;
  mixture.scale = reader.positive("routed_scaling_factor", 1.0);
  mixture.groups = reader.size("n_group", 1);
  mixture.chosen_groups = reader.size("topk_group", 1);
  if (mixture.experts % mixture.groups != 0 || mixture.chosen_groups > mixture.groups) {
    reader.refuse("n_group", "experts do not stand in groups of one size");
  }
  mixture.shared_intermediate = mixture.intermediate * reader.size("n_shared_experts", 1);
  const int64_t dense = reader.integer("first_k_dense_replace").value_or(usually_dense);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    config.mixture_layers[static_cast<size_t>(layer)] = layer >= dense;
  }
}

void read_glm4_moe(const ConfigReader& reader, ModelConfig& config) {
  read_groups(reader, config, 1);
  config.output_bias = false;  // attention_bias is of q, k and v
  config.qk_norm = reader.boolean("use_qk_norm").value_or(false);
}

/// A window in layers from max_window_layers on.
void read_dots1(const ConfigReader& reader, ModelConfig& config) {
  read_groups(reader, config, 0);
  config.mixture.renormalizes = reader.boolean("norm_topk_prob").value_or(false);
  const int64_t first = reader.integer("max_window_layers").value_or(62);
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [&](int64_t layer) {
    return layer >= first ? sliding_attention : full_attention;
  });
  set_windows(reader, types, 4096, config);
}

std::vector<Block> glm4_moe_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.correction = "mlp.gate.e_score_correction_bias", .shared = "mlp.shared_experts"};
  return {attention_block(config, layer), mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow glm4_moe_architecture = {.model_type = "glm4_moe",
                                                         .class_name = "Glm4MoeForCausalLM",
                                                         .sizes = {151552, 4096, 10944, 46, 96},
                                                         .mixture = {128, 8, 1408},
                                                         .kv_heads = 8,
                                                         .max_positions = 131072,
                                                         .partial_rotary_factor = 0.5,
                                                         .partial_rotary = true,
                                                         .rms_norm_eps = 1e-5,
                                                         .attention_bias = BiasRule::stated,
                                                         .gguf = "glm4moe",
                                                         .gguf_mlp_norm = "post_attention_norm",
                                                         .read = read_glm4_moe,
                                                         .blocks = glm4_moe_blocks};

/// The text model of one that sees: as GLM-4's mixtures without norms of heads.
constinit const ArchitectureRow glm4v_moe_architecture = {.model_type = "glm4v_moe_text",
                                                          .class_name = "Glm4vMoeTextModel",
                                                          .wrappers = {"Glm4vMoeForConditionalGeneration"},
                                                          .sizes = {151424, 4096, 10944, 46, 96},
                                                          .mixture = {128, 8, 1408},
                                                          .kv_heads = 8,
                                                          .max_positions = 65536,
                                                          .partial_rotary_factor = 0.5,
                                                          .partial_rotary = true,
                                                          .rms_norm_eps = 1e-5,
                                                          .biases_attention = true,
                                                          .attention_bias = BiasRule::stated,
                                                          .text_mrope = true,
                                                          .gguf = "glm4moe",
                                                          .gguf_mlp_norm = "post_attention_norm",
                                                          .read = read_glm4_moe,
                                                          .blocks = glm4_moe_blocks};

constinit const ArchitectureRow dots1_architecture = {.model_type = "dots1",
                                                      .class_name = "Dots1ForCausalLM",
                                                      .sizes = {152064, 4608, 10944, 62, 32},
                                                      .kv_heads = 32,
                                                      .max_positions = 2048,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .gguf = "dots1",
                                                      .read = read_dots1,
                                                      .blocks = glm4_moe_blocks};

}  // namespace w4q::model
