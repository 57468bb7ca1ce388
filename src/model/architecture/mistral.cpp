#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

/// A GGUF file of architecture "llama" is one of these where it has a window.
constinit const ArchitectureRow mistral_architecture = {
    .model_type = "mistral",
    .class_name = "MistralForCausalLM",
    .wrappers = {"Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"},
    .kv_heads = 8,
    .max_positions = 131072,
    .bos_token = 1,
    .eos_token = 2,
    .windows = WindowRule::all_layers,
    .gguf = "llama",
    .gguf_rotary_pairs = true,
    .blocks = llama_blocks};

namespace {

/// Queries far behind the original positions are scaled up.
void read_ministral3(const ConfigReader& reader, ModelConfig& config) {
  const io::Json* rope = reader.find("rope_parameters");
  if (rope == nullptr || !rope->is_object()) return;
  const double temperature =
      ConfigReader(*rope, reader.source(), "rope_parameters.").number("llama_4_scaling_beta").value_or(0);
  spread_attention(config);
  for (auto& layer : config.attention) {
    layer.temperature = temperature;
    layer.temperature_length = config.rope.original_max_positions;
  }
}

}  // namespace

constinit const ArchitectureRow ministral3_architecture = {.model_type = "ministral3",
                                                           .class_name = "Ministral3ForCausalLM",
                                                           .wrappers = {"Mistral3ForConditionalGeneration"},
                                                           .kv_heads = 8,
                                                           .max_positions = 262144,
                                                           .windows = WindowRule::all_layers,
                                                           .read = read_ministral3,
                                                           .blocks = llama_blocks};

}  // namespace w4q::model
