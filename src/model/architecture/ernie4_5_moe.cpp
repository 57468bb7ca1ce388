#include "core/error.h"
#include "core/text.h"
#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Neighbours turn together, and all linears have biases or none.
void read_ernie4_5(const ConfigReader& reader, ModelConfig& config) {
  config.qkv_bias = config.output_bias = config.mlp_bias = reader.boolean("use_bias").value_or(false);
  config.rope.neighbours = true;
}

void read_ernie4_5_moe(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {.experts = "moe_num_experts", .chosen = "moe_k"}, config);
  MixtureConfig& mixture = config.mixture;
  mixture.shared_intermediate = mixture.intermediate * reader.integer("moe_num_shared_experts").value_or(2);
  const int64_t first = reader.integer("moe_layer_start_index").value_or(1);
  const int64_t stated_last = reader.integer("moe_layer_end_index").value_or(-1);
  const int64_t last = stated_last < 0 ? config.layers - 1 : stated_last, step = reader.size("moe_layer_interval", 1);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    config.mixture_layers[static_cast<size_t>(layer)] = layer >= first && layer <= last && (layer + 1) % step == 0;
  }
  read_ernie4_5(reader, config);
  if (!config.qkv_bias) return;
  throw Error(ErrorCode::unsupported, concat(reader.source(), ": use_bias of a mixture"))
      .detail("its head has a bias too, which w4q does not decode");
}

std::vector<Block> ernie4_5_moe_blocks(const ModelConfig& config, int64_t layer) {
  MixtureNames names{.correction = "mlp.moe_statics.e_score_correction_bias", .wide_correction = true};
  if (config.mixture.shared_intermediate > 0) names.shared = "mlp.shared_experts";
  return {attention_block(config, layer), mixture_or_mlp_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow ernie4_5_architecture = {.model_type = "ernie4_5",
                                                         .class_name = "Ernie4_5ForCausalLM",
                                                         .sizes = {103424, 1024, 3072, 18, 16},
                                                         .kv_heads = 2,
                                                         .head_dim = 128,
                                                         .max_positions = 131072,
                                                         .rope_theta = 5e5,
                                                         .rms_norm_eps = 1e-5,
                                                         .bos_token = 1,
                                                         .eos_token = 2,
                                                         .ties_head = true,
                                                         .gguf = "ernie4_5",
                                                         .read = read_ernie4_5,
                                                         .blocks = llama_blocks};

constinit const ArchitectureRow ernie4_5_moe_architecture = {.model_type = "ernie4_5_moe",
                                                             .class_name = "Ernie4_5_MoeForCausalLM",
                                                             .sizes = {103424, 2560, 12288, 28, 20},
                                                             .mixture = {64, 6, 1536},
                                                             .kv_heads = 4,
                                                             .max_positions = 131072,
                                                             .rope_theta = 5e5,
                                                             .rms_norm_eps = 1e-5,
                                                             .ties_head = true,
                                                             .read = read_ernie4_5_moe,
                                                             .blocks = ernie4_5_moe_blocks};

}  // namespace w4q::model
