#include "model/architecture/readers.h"
#include "model/architecture/rows.h"
#include "model/config_rope.h"

namespace w4q::model {

/// A GGUF file of architecture "llama" is one of these where it has a window.
constinit const ArchitectureRow mistral_architecture = {
    .model_type = "mistral",
    .class_name = "MistralForCausalLM",
    .wrappers = {"Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"},
    .sizes = {32000, 4096, 14336, 32, 32},
    .kv_heads = 8,
    .max_positions = 131072,
    .bos_token = 1,
    .eos_token = 2,
    .windows = WindowRule::all_layers,
    .lists_windows = true,
    .gguf = "llama",
    .gguf_rotary_pairs = true,
    .blocks = llama_blocks};

namespace {

/// Queries far behind the original positions are scaled up.
void read_ministral3(const ConfigReader& reader, ModelConfig& config) {
  const io::Json rope = rope_parameters(reader, *config.architecture);
  const ConfigReader parameters(rope, reader.source(), "rope_parameters.");
  const double temperature = parameters.number("llama_4_scaling_beta").value_or(0);
  const int64_t original = parameters.size("original_max_position_embeddings", config.rope.original_max_positions);
  spread_attention(config);
  for (auto& layer : config.attention) {
    layer.temperature = temperature;
    layer.temperature_length = original;
  }
}

}  // namespace

constinit const ArchitectureRow ministral3_architecture = {
    .model_type = "ministral3",
    .class_name = "Ministral3ForCausalLM",
    .wrappers = {"Mistral3ForConditionalGeneration"},
    .sizes = {131072, 4096, 14336, 34, 32},
    .kv_heads = 8,
    .head_dim = 128,
    .max_positions = 262144,
    .rope_parameters = R"({"rope_type": "yarn", "rope_theta": 1000000, "factor": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1})",
    .rms_norm_eps = 1e-5,
    .window = 0,
    .windows = WindowRule::all_layers,
    .gguf = "mistral3",
    .gguf_rotary_pairs = true,
    .read = read_ministral3,
    .blocks = llama_blocks};

}  // namespace w4q::model
