#include "model/architecture/readers.h"
#include "model/architecture/rows.h"
#include "model/config_rope.h"

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

/// Layers with a window turn as before the context was stretched; by a theta of their own, which rope_theta is not.
void read_olmo3(const ConfigReader& reader, ModelConfig& config) {
  const double theta = config.architecture->rope_theta;
  config.rope = parse_rope(reader, {full_attention, config.head_dim, theta}, config);
  const RopeConfig local = parse_rope(reader, {sliding_attention, config.head_dim, theta, {}}, config);
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [](int64_t layer) {
    return (layer + 1) % 4 == 0 ? full_attention : sliding_attention;
  });
  spread_attention(config);
  set_windows(reader, types, 4096, config);
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] == sliding_attention) config.attention[layer].rope = local;
  }
}

/// "LLLG": local and global layers in turn; a number: each of so many is global.
std::function<std::string_view(int64_t)> exaone4_pattern(const ConfigReader& reader) {
  constexpr std::string_view key = "sliding_window_pattern";
  const io::Json* stated = reader.find("layer_types") == nullptr ? reader.find(key) : nullptr;
  std::string pattern = "LLLG";
  if (stated != nullptr && stated->is_string()) {
    pattern = *reader.text(key);
    if (pattern.empty()) reader.refuse(key, "expected L for local and G for global layers");
  } else if (stated != nullptr) {
    const int64_t every = reader.size(key);
    return [every](int64_t layer) { return (layer + 1) % every == 0 ? full_attention : sliding_attention; };
  }
  return [pattern](int64_t layer) {
    return pattern[static_cast<size_t>(layer) % pattern.size()] == 'L' ? sliding_attention : full_attention;
  };
}

/// Layers without a window do not turn.
void read_exaone4(const ConfigReader& reader, ModelConfig& config) {
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, exaone4_pattern(reader));
  spread_attention(config);
  set_windows(reader, types, 4096, config);
  const bool hybrid = !reader.states("sliding_window") || reader.find("sliding_window") != nullptr;
  for (auto& layer : config.attention) {
    if (hybrid && layer.window == 0) layer.rope.partial_rotary_factor = 0;
  }
}

}  // namespace

constinit const ArchitectureRow olmo2_architecture = {.model_type = "olmo2",
                                                      .class_name = "Olmo2ForCausalLM",
                                                      .sizes = {50304, 4096, 11008, 32, 32},
                                                      .max_positions = 2048,
                                                      .rms_norm_eps = 1e-5,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .whole_qk_norm = true,
                                                      .gguf = "olmo2",
                                                      .blocks = olmo2_blocks};

constinit const ArchitectureRow olmo3_architecture = {.model_type = "olmo3",
                                                      .class_name = "Olmo3ForCausalLM",
                                                      .sizes = {50304, 4096, 11008, 32, 32},
                                                      .max_positions = 2048,
                                                      .rope_theta = 5e5,
                                                      .rms_norm_eps = 1e-5,
                                                      .attention_bias = BiasRule::stated,
                                                      .qk_norm = true,
                                                      .whole_qk_norm = true,
                                                      .reads_rope = true,
                                                      .gguf = "olmo2",
                                                      .read = read_olmo3,
                                                      .blocks = olmo2_blocks};

constinit const ArchitectureRow exaone4_architecture = {.model_type = "exaone4",
                                                        .class_name = "Exaone4ForCausalLM",
                                                        .sizes = {102400, 4096, 16384, 32, 32},
                                                        .max_positions = 2048,
                                                        .rms_norm_eps = 1e-5,
                                                        .qk_norm = true,
                                                        .read = read_exaone4,
                                                        .blocks = olmo2_blocks};

}  // namespace w4q::model
