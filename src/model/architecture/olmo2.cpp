#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Norms behind both blocks alone.
std::vector<Block> olmo2_blocks(const ModelConfig& config, int64_t layer) {
  const auto behind = [&](Block block, std::string_view name) {
    return with_output_norm(with_input_norm(std::move(block), config, layer, {}), config, layer, name);
  };
  return {behind(attention_block(config, layer), "post_attention_layernorm"),
          behind(gated_mlp_block(config, layer), "post_feedforward_layernorm")};
}

/// Layers with a window turn as before the context was stretched.
void read_olmo3(const ConfigReader& reader, ModelConfig& config) {
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [](int64_t layer) {
    return (layer + 1) % 4 == 0 ? full_attention : sliding_attention;
  });
  spread_attention(config);
  set_windows(reader, types, 4096, config);
  for (auto& layer : config.attention) {
    if (layer.window > 0) layer.rope = RopeConfig{.theta = config.rope.theta};
  }
}

/// Layers without a window do not turn.
void read_exaone4(const ConfigReader& reader, ModelConfig& config) {
  const std::string pattern = reader.find("sliding_window_pattern") != nullptr && reader.find("layer_types") == nullptr
                                  ? reader.text("sliding_window_pattern").value_or("LLLG")
                                  : "LLLG";
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [&](int64_t layer) {
    return pattern[static_cast<size_t>(layer) % pattern.size()] == 'L' ? sliding_attention : full_attention;
  });
  spread_attention(config);
  set_windows(reader, types, 4096, config);
  const bool hybrid = reader.find("sliding_window") != nullptr;
  for (auto& layer : config.attention) {
    if (hybrid && layer.window == 0) layer.rope.partial_rotary_factor = 0;
  }
}

}  // namespace

constinit const ArchitectureRow olmo2_architecture = {.model_type = "olmo2",
                                                      .class_name = "Olmo2ForCausalLM",
                                                      .max_positions = 2048,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .whole_qk_norm = true,
                                                      .blocks = olmo2_blocks};

constinit const ArchitectureRow olmo3_architecture = {.model_type = "olmo3",
                                                      .class_name = "Olmo3ForCausalLM",
                                                      .max_positions = 2048,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .whole_qk_norm = true,
                                                      .read = read_olmo3,
                                                      .blocks = olmo2_blocks};

constinit const ArchitectureRow exaone4_architecture = {.model_type = "exaone4",
                                                        .class_name = "Exaone4ForCausalLM",
                                                        .max_positions = 2048,
                                                        .qk_norm = true,
                                                        .read = read_exaone4,
                                                        .blocks = olmo2_blocks};

}  // namespace w4q::model
