#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/text.h"
#include "io/system.h"
#include "model/architecture.h"
#include "model/architecture/readers.h"
#include "model/config_reader.h"
#include "model/config_rope.h"

namespace w4q::model {
namespace {

constexpr int64_t max_layers = 10000;
constexpr int64_t default_max_window_layers = 28;

[[noreturn]] void unknown_architecture(const ConfigReader& reader, std::string_view name) {
  throw Error(ErrorCode::unsupported, concat(reader.source(), ": architecture \"", printable(name), "\""))
      .detail(concat("not one of the ", architectures().size(), " that can be decoded"))
      .hint("w4q list names them");
}

std::string first_architecture(const ConfigReader& reader) {
  const io::Json* list = reader.find("architectures");
  if (list == nullptr || (list->is_array() && list->empty())) return {};
  if (!list->is_array() || !list->front().is_string()) reader.refuse("architectures", "expected a list of names");
  return list->front().get<std::string>();
}

const ArchitectureRow& find_architecture(const ConfigReader& reader) {
  const std::string type = reader.text("model_type").value_or(""), name = first_architecture(reader);
  if (type.empty() && name.empty()) reader.missing("architectures");
  const auto rows = architectures();
  const auto by_name = std::ranges::find(rows, name, &ArchitectureRow::class_name);
  const auto by_type = std::ranges::find(rows, type, &ArchitectureRow::model_type);
  if (!name.empty() && by_name == rows.end()) unknown_architecture(reader, name);
  if (!type.empty() && by_type == rows.end()) unknown_architecture(reader, type);
  if (!name.empty() && !type.empty() && by_name != by_type) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": model_type \"", type, "\" does not go with ", name));
  }
  return name.empty() ? **by_type : **by_name;
}

/// A text_config by itself: what it leaves unsaid of tokens and types, the file around it says, which alone says whether
/// the head is tied.
io::Json text_config_of(const io::Json& outer) {
  io::Json text = outer["text_config"];
  text.erase("tie_word_embeddings");
  for (const char* key : {"tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"}) {
    if (!text.contains(key) && outer.contains(key)) text[key] = outer[key];
  }
  return text;
}

/// Of a model that sees whose config is as flat as it was published: the text's keys stand at the top.
const ArchitectureRow* flat_architecture(const std::string& name) {
  const auto wraps = [&](const ArchitectureRow* row) {
    return row->text_mrope && std::ranges::find(row->wrappers, name) != row->wrappers.end();
  };
  const auto rows = architectures();
  const auto found = name.empty() ? rows.end() : std::ranges::find_if(rows, wraps);
  return found == rows.end() ? nullptr : *found;
}

/// The row of a model that is wrapped into one that sees or hears; null where it is none.
const ArchitectureRow* wrapped_architecture(const ConfigReader& reader) {
  const io::Json* text = reader.find("text_config");
  const std::string name = first_architecture(reader);
  if (text == nullptr || !text->is_object()) return flat_architecture(name);
  const bool any = std::ranges::find(wrappers_of_any(), name) != wrappers_of_any().end();
  const std::string type = ConfigReader(*text, reader.source(), "text_config.").text("model_type").value_or("");
  for (const auto* row : architectures()) {
    const bool wraps = !name.empty() && std::ranges::find(row->wrappers, name) != row->wrappers.end();
    if (any && row->model_type == type) return row;
    if (wraps && (type.empty() || row->model_type == type)) return row;
  }
  unknown_architecture(reader, type.empty() ? name : concat(name, " of ", type));
}

/// A size that a text_config may leave out where it is the usual one.
int64_t size_or(const ConfigReader& reader, const char* key, int64_t usual, ModelConfig& config) {
  const bool needed = !reader.nested() || reader.states(key);
  return size_or_usual(reader, key, needed ? 0 : usual, config);
}

void parse_sizes(const ConfigReader& reader, ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  config.vocab_size = size_or(reader, "vocab_size", row.sizes.vocabulary, config);
  config.hidden_size = size_or(reader, "hidden_size", row.sizes.hidden, config);
  const bool may_lack = row.only_experts && reader.find("intermediate_size") == nullptr;
  config.intermediate_size = may_lack ? 0 : size_or(reader, "intermediate_size", row.sizes.intermediate, config);
  config.layers = size_or(reader, "num_hidden_layers", row.sizes.layers, config);
  if (config.layers > max_layers) reader.refuse("num_hidden_layers", concat("expected at most ", max_layers));
  config.heads = size_or(reader, "num_attention_heads", row.sizes.heads, config);
  config.max_positions = reader.size("max_position_embeddings", row.max_positions);
  config.rms_norm_eps = reader.positive("rms_norm_eps", row.rms_norm_eps);
}

void parse_heads(const ConfigReader& reader, ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  const bool kv_stated = reader.states("num_key_value_heads");
  config.kv_heads = reader.size("num_key_value_heads", kv_stated ? config.heads : row.kv_heads.value_or(config.heads));
  if (config.heads % config.kv_heads != 0) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": ", config.heads, " attention heads do not share ",
                                            config.kv_heads, " key and value heads evenly"));
  }
  const bool row_sets = row.head_dim && !reader.states("head_dim");
  const int64_t fallback = row_sets ? *row.head_dim : config.hidden_size / config.heads;
  if (reader.find("head_dim") == nullptr && !row_sets && config.hidden_size % config.heads != 0) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": hidden_size ", config.hidden_size,
                                            " is not a multiple of ", config.heads, " heads, and head_dim is missing"));
  }
  config.head_dim = reader.size("head_dim", fallback);
  if (config.head_dim < 2 || config.head_dim % 2 != 0) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": head_dim ", config.head_dim, " is not even"));
  }
  if (config.heads * config.head_dim > INT32_MAX) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": ", config.heads, " heads of ", config.head_dim,
                                            " channels are more than 2147483647"));
  }
}

void parse_biases(const ConfigReader& reader, ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  const bool attention = reader.boolean("attention_bias").value_or(row.biases_attention);
  const bool mlp = reader.boolean("mlp_bias").value_or(false);
  config.output_bias = row.attention_bias == BiasRule::stated && attention;
  config.qkv_bias = row.attention_bias == BiasRule::always || config.output_bias;
  config.mlp_bias = row.mlp_bias == BiasRule::stated && mlp;
  config.qk_norm = row.qk_norm;
}

/// The window of the layers that have one; 0 when none has.
int64_t parse_window(const ConfigReader& reader, ModelConfig& config) {
  const WindowRule rule = config.architecture->windows;
  if (rule == WindowRule::none) return 0;
  const bool stated = rule == WindowRule::from_layer || rule == WindowRule::switched;
  if (stated && !reader.boolean("use_sliding_window").value_or(false)) return 0;
  if (!reader.states("sliding_window")) return config.architecture->window;
  const auto window = reader.integer("sliding_window");
  if (!window) return 0;
  if (*window < 0) reader.refuse("sliding_window", "expected a number of positions or null");
  if (*window == 0) config.warnings.push_back(concat(reader.source(), ": sliding_window 0 is taken as none"));
  return *window;
}

void parse_layer_types(const ConfigReader& reader, const io::Json& list, int64_t window, ModelConfig& config) {
  if (!list.is_array() || list.size() != static_cast<size_t>(config.layers)) {
    reader.refuse("layer_types", concat("expected a list with one entry for each of ", config.layers, " layers"));
  }
  for (size_t layer = 0; layer < list.size(); ++layer) {
    const auto type = list[layer].is_string() ? list[layer].get<std::string>() : std::string();
    if (type != "full_attention" && type != "sliding_attention") {
      throw Error(ErrorCode::unsupported, concat(reader.source(), ": layer_types: layer ", layer, " is ",
                                                 type.empty() ? "not a name" : "\"" + printable(type) + "\""))
          .detail("supported: full_attention, sliding_attention");
    }
    config.sliding_window.push_back(type == "sliding_attention" ? window : 0);
  }
}

void parse_windows(const ConfigReader& reader, ModelConfig& config) {
  const WindowRule rule = config.architecture->windows;
  const int64_t window = parse_window(reader, config);
  const io::Json* types = reader.find("layer_types");
  const bool listed = rule == WindowRule::from_layer || (config.architecture->lists_windows && !reader.nested());
  if (types != nullptr && listed) return parse_layer_types(reader, *types, window, config);
  const int64_t first = rule == WindowRule::from_layer
                            ? reader.integer("max_window_layers").value_or(default_max_window_layers)
                            : int64_t{0};
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    config.sliding_window.push_back(layer >= first ? window : 0);
  }
}

/// An id, a list of ids, or nothing.
std::vector<int64_t> parse_tokens(const ConfigReader& reader, std::string_view key) {
  const io::Json* value = reader.find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) return {*reader.integer(key)};
  std::vector<int64_t> tokens;
  for (const auto& entry : *value) {
    if (!entry.is_number_integer()) reader.refuse(key, "expected an integer or a list of integers");
    tokens.push_back(entry.get<int64_t>());
  }
  return tokens;
}

void parse_special_tokens(const ConfigReader& reader, ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  const auto bos = parse_tokens(reader, "bos_token_id");
  if (!bos.empty()) config.bos_token = bos.front();
  if (!reader.states("bos_token_id")) config.bos_token = row.bos_token;
  config.eos_tokens = parse_tokens(reader, "eos_token_id");
  if (!reader.states("eos_token_id") && row.eos_token) config.eos_tokens = {*row.eos_token};
}

}  // namespace

std::optional<int64_t> most_positions(const ModelConfig& config) noexcept {
  const RopeConfig& rope = config.rope;
  const auto scaled = [&](int64_t positions) {
    constexpr double no_limit = 1e18;
    const double stretched = std::min(no_limit, static_cast<double>(positions) * rope.factor);
    return std::max(config.max_positions, static_cast<int64_t>(stretched));
  };
  switch (rope.type) {
    case RopeType::dynamic:
      return std::nullopt;
    case RopeType::linear:
    case RopeType::yarn:
      return scaled(rope.original_max_positions);
    case RopeType::standard:
    case RopeType::longrope:
    case RopeType::proportional:
    case RopeType::llama3:  // their max_position_embeddings counts what the scaling added
      break;
  }
  return config.max_positions;
}

AttentionConfig ModelConfig::attention_of(int64_t layer) const {
  const auto index = static_cast<size_t>(layer);
  if (!attention.empty()) return attention[index];
  AttentionConfig result{.heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .rope = rope};
  result.window = sliding_window[index];
  return result;
}

int64_t ModelConfig::intermediate_of(int64_t layer) const {
  return intermediate_sizes.empty() ? intermediate_size : intermediate_sizes[static_cast<size_t>(layer)];
}

namespace {

/// The names that transformers has for them (ACT2FN); not those with parameters of their own.
constexpr std::pair<std::string_view, Activation> activations[] = {
    {"silu", Activation::silu},
    {"swish", Activation::silu},
    {"gelu", Activation::gelu},
    {"gelu_python", Activation::gelu},
    {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"gelu_python_tanh", Activation::gelu_tanh},
    {"gelu_new", Activation::gelu_tanh},
    {"gelu_fast", Activation::gelu_tanh},
    {"gelu_accurate", Activation::gelu_tanh},
    {"quick_gelu", Activation::quick_gelu},
    {"relu", Activation::relu},
    {"relu2", Activation::relu_squared},
    {"relu6", Activation::relu6},
    {"leaky_relu", Activation::leaky_relu},
    {"sigmoid", Activation::sigmoid},
    {"tanh", Activation::tanh},
    {"linear", Activation::linear},
    {"mish", Activation::mish},
    {"hardswish", Activation::hard_swish},
};

void parse_activation(const ConfigReader& reader, ModelConfig& config) {
  const std::string_view key = config.architecture->activation_key;
  if (key.empty()) return;
  const std::string name = reader.text(key).value_or(std::string(config.architecture->activation));
  const auto found = std::ranges::find(activations, name, &std::pair<std::string_view, Activation>::first);
  if (found == std::end(activations)) {
    std::vector<std::string> names;
    for (const auto& [known, activation] : activations) names.emplace_back(known);
    throw Error(ErrorCode::unsupported, concat(reader.source(), ": ", key, " \"", printable(name), "\""))
        .detail("supported: " + join(names));
  }
  config.activation = found->second;
}

ModelConfig parse_text_config(const ConfigReader& reader, const io::Json& json, const ArchitectureRow& row) {
  ModelConfig config;
  config.architecture = &row;
  config.architecture_name = row.class_name;
  parse_sizes(reader, config);
  parse_heads(reader, config);
  parse_activation(reader, config);
  if (row.scales_embedding) config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings");
  if (!config.tie_word_embeddings && row.ties_head) config.tie_word_embeddings = true;
  config.tied_embeddings = config.tie_word_embeddings.value_or(false);
  parse_biases(reader, config);
  config.dtype = checkpoint::stated_dtype(json);
  if (!row.reads_rope) {
    config.rope = parse_rope(reader, {.head_dim = config.head_dim, .theta = row.rope_theta}, config);
  }
  parse_windows(reader, config);
  parse_special_tokens(reader, config);
  if (row.read != nullptr) row.read(reader, config);
  return config;
}

}  // namespace

ModelConfig parse_config(const io::Json& json, std::string_view source) {
  const ConfigReader reader(json, source);
  const ArchitectureRow* const wrapped = wrapped_architecture(reader);
  if (wrapped == nullptr) return parse_text_config(reader, json, find_architecture(reader));
  const auto named = [&](ModelConfig config) {
    config.architecture_name = first_architecture(reader);
    return config;
  };
  if (reader.find("text_config") == nullptr) return named(parse_text_config(reader, json, *wrapped));
  const io::Json text = text_config_of(json);
  return named(parse_text_config(ConfigReader(text, source, "text_config."), text, *wrapped));
}

ModelConfig read_config(const io::Json& json, const std::filesystem::path& folder) {
  ModelConfig config = parse_config(json, (folder / "config.json").string());
  const auto generation_path = folder / "generation_config.json";
  if (!io::path_exists(generation_path)) return config;
  const io::Json generation = io::read_json(generation_path);
  const auto eos = parse_tokens(ConfigReader(generation, generation_path.string()), "eos_token_id");
  if (!eos.empty()) config.eos_tokens = eos;
  return config;
}

ModelConfig read_any_config(const io::Json& json, const std::filesystem::path& folder) {
  try {
    return read_config(json, folder);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    const ConfigReader reader(json, (folder / "config.json").string());
    ModelConfig config;
    config.architecture_name = first_architecture(reader);
    config.tie_word_embeddings = reader.boolean("tie_word_embeddings");
    config.tied_embeddings = config.tie_word_embeddings.value_or(false);
    config.undecoded = error.summary();
    config.dtype = checkpoint::stated_dtype(json);
    return config;
  }
}

void require_decoder(const ModelConfig& config, std::string_view what) {
  if (config.architecture != nullptr) return;
  throw Error(ErrorCode::unsupported, config.undecoded)
      .detail(concat(what, " needs a model that w4q can decode (w4q list names them)"))
      .hint("quantize without calibration, repack, inspect, and verify without --ppl take any folder of safetensors");
}

ModelConfig read_config(const std::filesystem::path& folder) {
  return read_config(io::read_json(folder / "config.json"), folder);
}

}  // namespace w4q::model
