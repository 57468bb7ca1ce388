#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// q, k and v are one matrix, and so are gate and up.
std::vector<Block> phi3_blocks(const ModelConfig& config, int64_t layer) {
  return {fused_attention_block(config, layer), fused_mlp_block(config, layer)};
}

}  // namespace

constinit const ArchitectureRow phi3_architecture = {.model_type = "phi3",
                                                     .class_name = "Phi3ForCausalLM",
                                                     .sizes = {32064, 3072, 8192, 32, 32},
                                                     .max_positions = 4096,
                                                     .original_positions = 4096,
                                                     .partial_rotary = true,
                                                     .rms_norm_eps = 1e-5,
                                                     .window = 0,
                                                     .windows = WindowRule::all_layers,
                                                     .gguf = "phi3",
                                                     .blocks = phi3_blocks};

}  // namespace w4q::model
