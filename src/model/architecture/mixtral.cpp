#include "model/architecture/readers.h"
#include "model/architecture/rows.h"
#include "model/config_rope.h"

namespace w4q::model {

namespace {

void read_mixtral(const ConfigReader& reader, ModelConfig& config) {
  read_mixture(reader, {.experts = "num_local_experts", .intermediate = "intermediate_size"}, config);
}

constexpr MixtureNames mixtral_names{
    .router = "block_sparse_moe.gate", .experts = "block_sparse_moe.experts", .gate = "w1", .up = "w3", .down = "w2"};

std::vector<Block> mixtral_blocks(const ModelConfig& config, int64_t layer) {
  return {attention_block(config, layer), mixture_block(config, layer, mixtral_names)};
}

/// Queries and keys have a norm over all heads, a part of each head turns.
void read_minimax_m2(const ConfigReader& reader, ModelConfig& config) {
  read_mixtral(reader, config);
  config.mixture.scoring = Scoring::sigmoid;
  RopeQuery query{.head_dim = config.head_dim, .theta = config.architecture->rope_theta};
  if (reader.find("rotary_dim") != nullptr) {  // where partial_rotary_factor does not say it
    const int64_t rotary = reader.size("rotary_dim");
    if (rotary > config.head_dim || rotary % 2 != 0) reader.refuse("rotary_dim", "expected an even part of a head");
    query.part = static_cast<double>(rotary) / static_cast<double>(config.head_dim);
  }
  config.rope = parse_rope(reader, query, config);
}

std::vector<Block> minimax_m2_blocks(const ModelConfig& config, int64_t layer) {
  MixtureNames names = mixtral_names;
  names.correction = "block_sparse_moe.e_score_correction_bias";
  return {attention_block(config, layer), mixture_block(config, layer, names)};
}

}  // namespace

constinit const ArchitectureRow mixtral_architecture = {.model_type = "mixtral",
                                                        .class_name = "MixtralForCausalLM",
                                                        .sizes = {32000, 4096, 14336, 32, 32},
                                                        .mixture = {8, 2, 14336},
                                                        .kv_heads = 8,
                                                        .max_positions = 131072,
                                                        .rope_theta = 1e6,
                                                        .rms_norm_eps = 1e-5,
                                                        .window = 0,
                                                        .windows = WindowRule::all_layers,
                                                        .gguf = "llama",
                                                        .gguf_rotary_pairs = true,
                                                        .read = read_mixtral,
                                                        .blocks = mixtral_blocks};

constinit const ArchitectureRow minimax_m2_architecture = {.model_type = "minimax_m2",
                                                           .class_name = "MiniMaxM2ForCausalLM",
                                                           .sizes = {200064, 3072, 1536, 62, 48},
                                                           .mixture = {256, 8, 1536},
                                                           .kv_heads = 8,
                                                           .head_dim = 128,
                                                           .max_positions = 196608,
                                                           .rope_theta = 5e6,
                                                           .partial_rotary = true,
                                                           .qk_norm = true,
                                                           .whole_qk_norm = true,
                                                           .windows = WindowRule::none,
                                                           .reads_rope = true,
                                                           .gguf = "minimax-m2",
                                                           .read = read_minimax_m2,
                                                           .blocks = minimax_m2_blocks};

}  // namespace w4q::model
