#include <algorithm>

#include "model/architecture/readers.h"
#include "model/architecture/rows.h"

namespace w4q::model {

namespace {

/// Some layers do not turn; they are those that may have a window.
void read_smollm3(const ConfigReader& reader, ModelConfig& config) {
  spread_attention(config);
  const int64_t interval = reader.size("no_rope_layer_interval", 4);
  const io::Json* list = reader.find("no_rope_layers");
  if (list != nullptr && (!list->is_array() || std::ssize(*list) != config.layers)) {
    reader.refuse("no_rope_layers", "expected 1 or 0 for each layer");
  }
  std::vector<bool> turning;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto index = static_cast<size_t>(layer);
    const bool turns = list == nullptr ? (layer + 1) % interval != 0 : (*list)[index] != 0;
    turning.push_back(turns);
    if (!turns) config.attention[index].rope.partial_rotary_factor = 0;
  }
  const bool slides = reader.boolean("use_sliding_window").value_or(false);  // where layer_types does not say it
  const auto types = read_layer_types(reader, config, {full_attention, sliding_attention}, [&](int64_t layer) {
    return turning[static_cast<size_t>(layer)] || !slides ? full_attention : sliding_attention;
  });
  if (std::ranges::find(types, sliding_attention) == types.end()) return;
  set_windows(reader, types, config.architecture->window, config);
}

}  // namespace

constinit const ArchitectureRow smollm3_architecture = {.model_type = "smollm3",
                                                        .class_name = "SmolLM3ForCausalLM",
                                                        .sizes = {128256, 2048, 11008, 36, 16},
                                                        .kv_heads = 4,
                                                        .max_positions = 32768,
                                                        .rope_theta = 2e6,
                                                        .window = 0,
                                                        .attention_bias = BiasRule::stated,
                                                        .mlp_bias = BiasRule::stated,
                                                        .ties_head = true,
                                                        .gguf = "smollm3",
                                                        .gguf_rotary_pairs = true,
                                                        .read = read_smollm3,
                                                        .blocks = llama_blocks};

}  // namespace w4q::model
