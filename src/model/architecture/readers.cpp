#include "model/architecture/readers.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {

std::vector<std::string> read_layer_types(const ConfigReader& reader, const ModelConfig& config,
                                          std::initializer_list<std::string_view> known,
                                          const std::function<std::string_view(int64_t layer)>& otherwise) {
  std::vector<std::string> types;
  const io::Json* list = reader.find("layer_types");
  if (list == nullptr) {
    for (int64_t layer = 0; layer < config.layers; ++layer) types.emplace_back(otherwise(layer));
    return types;
  }
  if (!list->is_array() || list->size() != static_cast<size_t>(config.layers)) {
    reader.refuse("layer_types", concat("expected a list with one entry for each of ", config.layers, " layers"));
  }
  for (const io::Json& entry : *list) {
    const auto type = entry.is_string() ? entry.get<std::string>() : std::string();
    if (std::ranges::find(known, type) == known.end()) {
      std::vector<std::string> names(known.begin(), known.end());
      throw Error(ErrorCode::unsupported, concat(reader.source(), ": layer_types: layer ", types.size(), " is ",
                                                 type.empty() ? "not a name" : "\"" + printable(type) + "\""))
          .detail(concat("supported: ", join(names)));
    }
    types.push_back(type);
  }
  return types;
}

void set_windows(const ConfigReader& reader, const std::vector<std::string>& types, int64_t otherwise,
                 ModelConfig& config) {
  const bool none = reader.states("sliding_window") && reader.find("sliding_window") == nullptr;
  const int64_t window = none ? 0 : reader.size("sliding_window", otherwise);
  for (size_t layer = 0; layer < types.size(); ++layer) {
    config.sliding_window[layer] = types[layer] == sliding_attention ? window : 0;
    if (!config.attention.empty()) config.attention[layer].window = config.sliding_window[layer];
  }
}

void refuse_later_tokens(const ConfigReader& reader) {
  constexpr std::string_view key = "use_bidirectional_attention";
  const io::Json* value = reader.find(key);
  if (value == nullptr || *value == false || *value == "vision") return;
  throw Error(ErrorCode::unsupported, concat(reader.source(), ": ", key))
      .detail("tokens attend to those behind them: a model that embeds texts, which w4q does not decode");
}

void spread_attention(ModelConfig& config) {
  std::vector<AttentionConfig> layers;
  for (int64_t layer = 0; layer < config.layers; ++layer) layers.push_back(config.attention_of(layer));
  config.attention = std::move(layers);
}

int64_t size_or_usual(const ConfigReader& reader, std::string_view key, int64_t usual, ModelConfig& config) {
  if (usual == 0 || reader.find(key) != nullptr) return reader.size(key);
  config.warnings.push_back(concat(reader.source(), ": ", key, " is missing; ", usual, " is assumed"));
  return usual;
}

void read_mixture(const ConfigReader& reader, const MixtureKeys& keys, ModelConfig& config) {
  MixtureConfig& mixture = config.mixture;
  const UsualMixture& usual = config.architecture->mixture;
  std::string_view experts = keys.experts;
  for (const std::string_view other : {"num_local_experts", "num_experts"}) {  // one another's names in transformers 5
    if (reader.find(experts) == nullptr && reader.find(other) != nullptr) experts = other;
  }
  mixture.experts = size_or_usual(reader, experts, usual.experts, config);
  mixture.chosen = size_or_usual(reader, keys.chosen, usual.chosen, config);
  if (mixture.chosen > mixture.experts) reader.refuse(keys.chosen, concat("there are ", mixture.experts, " experts"));
  constexpr int64_t most_experts = int64_t{1} << 20;  // of all layers: today's largest have some 25,000
  if (mixture.experts > most_experts / config.layers) {
    reader.refuse(keys.experts, concat("expected at most ", most_experts / config.layers));
  }
  mixture.intermediate = size_or_usual(reader, keys.intermediate, usual.intermediate, config);
  if (!keys.shared_intermediate.empty()) {
    mixture.shared_intermediate = size_or_usual(reader, keys.shared_intermediate, usual.shared, config);
  }
  mixture.renormalizes = reader.boolean(keys.renormalizing).value_or(keys.renormalizes);
  config.mixture_layers.assign(static_cast<size_t>(config.layers), true);
}

void leave_dense(const ConfigReader& reader, ModelConfig& config) {
  const int64_t step = reader.size("decoder_sparse_step", 1);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    config.mixture_layers[static_cast<size_t>(layer)] = (layer + 1) % step == 0;
  }
  const io::Json* dense = reader.find("mlp_only_layers");
  if (dense == nullptr) return;
  for (const io::Json& entry : dense->is_array() ? *dense : io::Json::array({-1})) {
    const int64_t layer = entry.is_number_integer() ? entry.get<int64_t>() : -1;
    if (layer < 0) reader.refuse("mlp_only_layers", "expected a list of layers");
    if (layer < config.layers) config.mixture_layers[static_cast<size_t>(layer)] = false;
  }
}

namespace {

void read_delta_net(const ConfigReader& reader, ModelConfig& config) {
  kernels::DeltaShape& shape = config.delta;
  shape = {.key_heads = size_or_usual(reader, "linear_num_key_heads", 16, config),
           .value_heads = size_or_usual(reader, "linear_num_value_heads", 32, config),
           .key_dim = size_or_usual(reader, "linear_key_head_dim", 128, config),
           .value_dim = size_or_usual(reader, "linear_value_head_dim", 128, config),
           .taps = reader.size("linear_conv_kernel_dim", 4)};
  if (shape.value_heads % shape.key_heads != 0) {
    reader.refuse("linear_num_value_heads", concat(shape.key_heads, " key heads are not shared evenly"));
  }
  constexpr int64_t most = int64_t{1} << 20;
  for (const auto& [key, size] : {std::pair{"linear_key_head_dim", shape.key_heads * shape.key_dim},
                                  std::pair{"linear_value_head_dim", shape.value_heads * shape.value_dim},
                                  std::pair{"linear_conv_kernel_dim", shape.taps}}) {
    if (size > most) reader.refuse(key, "the sizes are absurd");
  }
}

}  // namespace

void read_hybrid_layers(const ConfigReader& reader, ModelConfig& config) {
  read_delta_net(reader, config);
  const int64_t interval = reader.size("full_attention_interval", 4);
  const auto types = read_layer_types(reader, config, {full_attention, linear_attention}, [&](int64_t layer) {
    return (layer + 1) % interval == 0 ? full_attention : linear_attention;
  });
  spread_attention(config);
  for (size_t layer = 0; layer < types.size(); ++layer) {
    config.delta_layers.push_back(types[layer] == linear_attention);
    config.attention[layer].output_gate = true;  // whatever attn_output_gate says, as in transformers
  }
}

}  // namespace w4q::model
