#include <cmath>

#include "model/architecture/readers.h"
#include "model/architecture/rows.h"
#include "model/config_rope.h"

namespace w4q::model {

namespace {

/// Norms before and behind both blocks.
std::vector<Block> gemma2_blocks(const ModelConfig& config, int64_t layer) {
  auto mlp = with_input_norm(gated_mlp_block(config, layer), config, layer, "pre_feedforward_layernorm");
  return {with_output_norm(attention_block(config, layer), config, layer, "post_attention_layernorm"),
          with_output_norm(std::move(mlp), config, layer, "post_feedforward_layernorm")};
}

/// A bound that null takes away.
double read_cap(const ConfigReader& reader, std::string_view key, double otherwise) {
  return reader.number(key).value_or(reader.states(key) ? 0 : otherwise);
}

void read_gemma(const ConfigReader& reader, ModelConfig& config) {
  refuse_later_tokens(reader);
  spread_attention(config);
  const double width = reader.positive("query_pre_attn_scalar", 256);
  for (auto& layer : config.attention) layer.scale = 1 / std::sqrt(width);
}

/// "gelu" was written where the one by tanh was meant.
void read_first_gemma(const ConfigReader& reader, ModelConfig& config) {
  refuse_later_tokens(reader);
  if (config.activation == Activation::gelu) config.activation = Activation::gelu_tanh;
}

/// Every other layer has a window.
void read_gemma2(const ConfigReader& reader, ModelConfig& config) {
  read_gemma(reader, config);
  config.logit_cap = read_cap(reader, "final_logit_softcapping", 30);
  const double cap = read_cap(reader, "attn_logit_softcapping", 50);
  for (auto& layer : config.attention) layer.soft_cap = cap;
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [](int64_t layer) {
    return layer % 2 == 0 ? sliding_attention : full_attention;
  });
  set_windows(reader, types, 4096, config);
}

/// Layers with a window turn by another theta.
void read_gemma3(const ConfigReader& reader, ModelConfig& config) {
  config.rope = parse_rope(reader, {full_attention, config.head_dim, 1e6}, config);
  const RopeConfig local =
      parse_rope(reader, {sliding_attention, config.head_dim, 10000.0, "rope_local_base_freq"}, config);
  read_gemma(reader, config);
  // The head of one that sees does without.
  if (!reader.nested()) config.logit_cap = read_cap(reader, "final_logit_softcapping", 0);
  const int64_t pattern = reader.size("sliding_window_pattern", 6);
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [&](int64_t layer) {
    return (layer + 1) % pattern == 0 ? full_attention : sliding_attention;
  });
  set_windows(reader, types, 4096, config);
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] == sliding_attention) config.attention[layer].rope = local;
  }
}

}  // namespace

constinit const ArchitectureRow gemma_architecture = {.model_type = "gemma",
                                                      .class_name = "GemmaForCausalLM",
                                                      .sizes = {256000, 3072, 24576, 28, 16},
                                                      .kv_heads = 16,
                                                      .head_dim = 256,
                                                      .max_positions = 8192,
                                                      .bos_token = 2,
                                                      .eos_token = 1,
                                                      .attention_bias = BiasRule::stated,
                                                      .activation = "gelu_pytorch_tanh",
                                                      .norm_offset = 1,
                                                      .scales_embedding = true,
                                                      .ties_head = true,
                                                      .gguf = "gemma",
                                                      .read = read_first_gemma,
                                                      .blocks = llama_blocks};

constinit const ArchitectureRow gemma2_architecture = {.model_type = "gemma2",
                                                       .class_name = "Gemma2ForCausalLM",
                                                       .sizes = {256000, 2304, 9216, 26, 8},
                                                       .kv_heads = 4,
                                                       .head_dim = 256,
                                                       .max_positions = 8192,
                                                       .attention_bias = BiasRule::stated,
                                                       .activation_key = "hidden_activation",
                                                       .activation = "gelu_pytorch_tanh",
                                                       .norm_offset = 1,
                                                       .scales_embedding = true,
                                                       .ties_head = true,
                                                       .gguf = "gemma2",
                                                       .read = read_gemma2,
                                                       .blocks = gemma2_blocks};

constinit const ArchitectureRow gemma3_architecture = {.model_type = "gemma3_text",
                                                       .class_name = "Gemma3ForCausalLM",
                                                       .wrappers = {"Gemma3ForConditionalGeneration"},
                                                       .sizes = {262208, 2304, 9216, 26, 8},
                                                       .kv_heads = 4,
                                                       .head_dim = 256,
                                                       .max_positions = 131072,
                                                       .attention_bias = BiasRule::stated,
                                                       .qk_norm = true,
                                                       .activation_key = "hidden_activation",
                                                       .activation = "gelu_pytorch_tanh",
                                                       .norm_offset = 1,
                                                       .scales_embedding = true,
                                                       .ties_head = true,
                                                       .reads_rope = true,
                                                       .gguf = "gemma3",
                                                       .read = read_gemma3,
                                                       .blocks = gemma2_blocks};

}  // namespace w4q::model
