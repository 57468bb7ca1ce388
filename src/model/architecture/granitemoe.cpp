#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Multipliers of embeddings, of what is added to the residual stream, of logits and of attention's.
void read_granite(const ConfigReader& reader, ModelConfig& config) {
  config.embedding_scale = reader.positive("embedding_multiplier", 1.0);
  config.residual_scale = reader.positive("residual_multiplier", 1.0);
  config.logit_scale = 1 / reader.positive("logits_scaling", 1.0);
  spread_attention(config);
  for (auto& layer : config.attention) layer.scale = reader.positive("attention_multiplier", 1.0);
}

void read_granitemoe(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {.experts = "num_local_experts", .intermediate = "intermediate_size"}, config);
  config.mixture.storage = ExpertStorage::stacked_halves;
  config.mixture.stacks_alone = true;
  read_granite(reader, config);
}

std::vector<Block> granitemoe_blocks(const ModelConfig& config, int64_t layer) {
  constexpr MixtureNames names{.router = "block_sparse_moe.router.layer",
                               .stacked_inputs = "block_sparse_moe.input_linear",
                               .stacked_outputs = "block_sparse_moe.output_linear"};
  return {attention_block(config, layer), mixture_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow granite_architecture = {.model_type = "granite",
                                                        .class_name = "GraniteForCausalLM",
                                                        .sizes = {32000, 4096, 11008, 32, 32},
                                                        .max_positions = 2048,
                                                        .bos_token = 1,
                                                        .eos_token = 2,
                                                        .attention_bias = BiasRule::stated,
                                                        .mlp_bias = BiasRule::stated,
                                                        .gguf = "granite",
                                                        .gguf_rotary_pairs = true,
                                                        .read = read_granite,
                                                        .blocks = llama_blocks};

constinit const ArchitectureRow granitemoe_architecture = {.model_type = "granitemoe",
                                                           .class_name = "GraniteMoeForCausalLM",
                                                           .sizes = {32000, 4096, 11008, 32, 32},
                                                           .mixture = {8, 2, 11008},
                                                           .max_positions = 2048,
                                                           .attention_bias = BiasRule::stated,
                                                           .end_of_stack = ".weight",
                                                           .read = read_granitemoe,
                                                           .blocks = granitemoe_blocks};

}  // namespace w4q::model
