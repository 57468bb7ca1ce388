#include "core/error.h"
#include "core/text.h"
#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

void read_olmoe(const ConfigReader& reader, ModelConfig& config) {
  if (const auto clip = reader.number("clip_qkv")) {
    if (!(*clip > 0)) reader.refuse("clip_qkv", "nothing is left of queries, keys and values");
    spread_attention(config);
    for (AttentionConfig& attention : config.attention) attention.clip = *clip;
  }
  read_mixture(reader, {.intermediate = "intermediate_size", .renormalizing = norm_topk_prob, .renormalizes = false},
               config);
}

std::vector<Block> olmoe_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), mixture_block(config, layer, {})};
}

}  // namespace

constinit const ArchitectureRow olmoe_architecture = {.model_type = "olmoe",
                                                      .class_name = "OlmoeForCausalLM",
                                                      .sizes = {50304, 2048, 2048, 16, 16},
                                                      .mixture = {64, 8, 2048},
                                                      .max_positions = 4096,
                                                      .rms_norm_eps = 1e-5,
                                                      .eos_token = 50279,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .whole_qk_norm = true,
                                                      .gguf = "olmoe",
                                                      .read = read_olmoe,
                                                      .blocks = olmoe_blocks};

}  // namespace w4q::model
