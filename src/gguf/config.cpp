#include "gguf/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/text.h"
#include "gguf/family_rows.h"
#include "gguf/rope.h"
#include "model/architecture.h"

namespace w4q::gguf {
namespace {

using model::ArchitectureRow;
using model::BiasRule;

/// Keys of other models that share an architecture's name: with a value that changes the result they are refused.
constexpr std::array<std::string_view, 8> foreign_numbers = {
    "%.expert_count",    "%.attention.scale",        "%.logit_scale",         "%.residual_scale",
    "%.embedding_scale", "%.attn_logit_softcapping", "%.attention.clamp_kqv", "%.final_logit_softcapping",
};

bool has_experts(const ArchitectureRow& row) {
  const GgufFamily* family = gguf_family(row.model_type);
  return family != nullptr && family->mixture;
}

bool sees(const ArchitectureRow& row) {
  const GgufFamily* family = gguf_family(row.model_type);
  return family != nullptr && family->sees;
}

/// Whether several of a picture's positions turn pairs of their own; readers look at the first two alone.
bool has_picture_pairs(const GgufKeys& keys) {
  const auto* sections = keys.integers("%.rope.dimension_sections");
  return sections != nullptr && sections->size() >= 2 && (*sections)[0] > 0 && (*sections)[1] > 0;
}

/// Leaves those for which `has` is what the file says, or all where none is.
void keep_like(std::vector<const ArchitectureRow*>& rows, bool (*has)(const ArchitectureRow& row), bool stated) {
  if (std::ranges::none_of(rows, [&](const auto* row) { return has(*row) == stated; })) return;
  std::erase_if(rows, [&](const auto* row) { return has(*row) != stated; });
}

/// Of rows that share a name, the one with experts, the one that sees and the one with windows only for a file that has
/// them.
const ArchitectureRow& find_architecture(const GgufKeys& keys, int64_t window) {
  const auto rows = model::architectures();
  const bool experts = keys.integer("%.expert_count").value_or(0) > 0;
  std::vector<const ArchitectureRow*> named;
  for (const auto* row : rows) {
    if (row->gguf == keys.architecture()) named.push_back(row);
  }
  if (keys.architecture().empty() || named.empty()) {
    std::vector<std::string> known;
    for (const auto* row : rows) {
      const bool is_new = !row->gguf.empty() && std::ranges::find(known, row->gguf) == known.end();
      if (is_new) known.emplace_back(row->gguf);
    }
    throw keys.error(ErrorCode::unsupported, "general.architecture", concat("\"", printable(keys.architecture()), "\""))
        .detail("supported: " + join(known));
  }
  keep_like(named, has_experts, experts);
  keep_like(named, sees, has_picture_pairs(keys));
  if (window == 0) return *named.front();
  for (const auto* row : named) {
    const GgufFamily* family = gguf_family(row->model_type);
    if (family != nullptr && family->own_windows) return *row;
  }
  const auto found = std::ranges::find(named, model::WindowRule::all_layers, &ArchitectureRow::windows);
  if (found == named.end()) throw keys.error(ErrorCode::unsupported, "%.attention.sliding_window", concat(window));
  return **found;
}

/// llama.cpp reads no file without it.
double stated_eps(const GgufKeys& keys) {
  constexpr std::string_view key = "%.attention.layer_norm_rms_epsilon";
  const auto stated = keys.number(key);
  if (!stated) throw keys.error(ErrorCode::bad_file, key, "is missing: what norms add to a mean square");
  return *stated;
}

void refuse_foreign(const GgufKeys& keys, const GgufFamily* family) {
  for (const auto key : foreign_numbers) {
    if (family != nullptr && std::ranges::find(family->keys, key) != family->keys.end()) continue;
    const auto value = keys.number(key);
    if (value.value_or(0) != 0) throw keys.error(ErrorCode::unsupported, key, concat("is ", *value));
  }
  if (!keys.boolean("%.attention.causal").value_or(true)) {
    throw keys.error(ErrorCode::unsupported, "%.attention.causal", "is false");
  }
}

/// All heads have one width for queries, keys and values, and all of it rotates, unless `partial`.
int64_t head_dim_of(const GgufKeys& keys, int64_t hidden, int64_t heads, bool partial) {
  constexpr std::string_view rotating = "%.rope.dimension_count";
  const int64_t head_dim = keys.size("%.attention.key_length", std::max<int64_t>(1, hidden / heads));
  for (const std::string_view key : {std::string_view("%.attention.value_length"), rotating}) {
    const int64_t value = keys.size(key, head_dim);
    if (value == head_dim || (partial && key == rotating && value < head_dim)) continue;
    throw keys.error(ErrorCode::unsupported, key, concat("is ", value))
        .detail(concat("heads have ", head_dim, " channels"));
  }
  return head_dim;
}

/// The first size of a matrix: the vocabulary is as long as its embedding table, padding included.
int64_t rows_of(const io::GgufFile& file, const GgufKeys& keys, std::string_view name) {
  const auto* tensor = file.find(name);
  if (tensor != nullptr && tensor->shape.size() == 2) return tensor->shape[0];
  throw keys.error(ErrorCode::bad_file, name, tensor == nullptr ? "is missing" : "is not a matrix");
}

/// Biases are where their tensors are; the first layer speaks for all.
void add_biases(const io::GgufFile& file, const GgufKeys& keys, const ArchitectureRow& row, io::Json& config) {
  const bool query = has(file, "blk.0.attn_q.bias"), output = has(file, "blk.0.attn_output.bias");
  const bool mlp = has(file, "blk.0.ffn_gate.bias");
  if (row.attention_bias == BiasRule::stated) {
    if (query != output)
      throw keys.error(ErrorCode::unsupported, "blk.0.attn_output.bias", "without attn_q.bias, or the reverse");
    config["attention_bias"] = query;
  } else if (output || (query && row.attention_bias == BiasRule::never)) {
    throw keys.error(ErrorCode::unsupported, "blk.0.attn_output.bias", concat("in a model of type ", row.model_type));
  }
  if (row.mlp_bias == BiasRule::stated) {
    config["mlp_bias"] = mlp;
  } else if (mlp) {
    throw keys.error(ErrorCode::unsupported, "blk.0.ffn_gate.bias", "is present");
  }
}

io::Json eos_tokens(const GgufKeys& keys) {
  io::Json tokens = io::Json::array();
  for (const std::string_view key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    const auto id = keys.integer(key);
    if (id && std::ranges::find(tokens, io::Json(*id)) == tokens.end()) tokens.push_back(*id);
  }
  if (tokens.empty()) return nullptr;
  return tokens.size() == 1 ? tokens[0] : tokens;
}

io::Json optional_id(const std::optional<int64_t>& id) { return id ? io::Json(*id) : io::Json(nullptr); }

/// A number of channels of each head that rotate.
int64_t rotating(const model::ModelConfig& config) {
  return std::llround(static_cast<double>(config.head_dim) * config.rope.partial_rotary_factor);
}

/// The one window of all layers, 0 for none.
int64_t common_window(const model::ModelConfig& config) {
  const int64_t window = config.sliding_window.empty() ? 0 : config.sliding_window.front();
  const bool mistral = config.architecture->windows == model::WindowRule::all_layers;
  if (std::ranges::all_of(config.sliding_window,
                          [&](int64_t each) { return each == window && (each == 0 || mistral); })) {
    return window;
  }
  throw Error(ErrorCode::unsupported, "config.json: sliding windows")
      .detail("GGUF cannot say which layers have them")
      .hint("llama.cpp could not run it: repack or quantize --to another format, which other programs load");
}

/// Readers take the usual one of the architecture, whatever config.json says.
void demand_activation(const model::ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  if (row.activation_key.empty()) return;
  const auto usual = row.activation == "silu" ? model::Activation::silu : model::Activation::gelu_tanh;
  demand(config.activation == usual, config, concat(row.activation_key, " other than ", row.activation));
}

/// What divides frequencies of Gemma 4's layers without a window: pairs that stand are divided by so much.
std::vector<float> turning_factors(const model::RopeConfig& rope, int64_t head_dim) {
  std::vector<float> factors(static_cast<size_t>(head_dim / 2), 1e30f);
  const auto turning = static_cast<size_t>(rope.partial_rotary_factor * static_cast<double>(factors.size()));
  std::fill_n(factors.begin(), turning, 1.0f);
  return factors;
}

/// As one number; of sizes that differ between layers, which a family reads by itself, the first.
int64_t first_size(const GgufKeys& keys, std::string_view key, const GgufFamily* family, int64_t layers) {
  const bool own = family != nullptr && family->own_sizes && keys.is_array(key);
  return own ? keys.layers(key, layers).front() : keys.size(key);
}

}  // namespace

std::vector<float> read_rope_factors(const io::GgufFile& file, const GgufKeys& keys, std::string_view name,
                                     int64_t pairs) {
  const auto* tensor = file.find(name);
  if (tensor == nullptr) return {};
  if (tensor->type != GgmlType::f32 || tensor->shape != Shape{pairs}) {
    throw keys.error(ErrorCode::bad_file, name, concat(ggml_type_name(tensor->type), " ", shape_text(tensor->shape)))
        .detail(concat("expected F32 [", pairs, "]"));
  }
  std::vector<float> factors(static_cast<size_t>(pairs));
  std::memcpy(factors.data(), file.bytes(*tensor).data(), tensor->size);
  return factors;
}

bool is_rope_factors(std::string_view tensor) noexcept {
  return tensor == rope_factors_tensor || tensor == rope_short_tensor || tensor == rope_long_tensor;
}

io::Json config_from_gguf(const io::GgufFile& file, const GgufKeys& keys, DType dtype) {
  const int64_t window = keys.integer("%.attention.sliding_window").value_or(0);
  const ArchitectureRow& row = find_architecture(keys, window);
  const GgufFamily* family = gguf_family(row.model_type);
  refuse_foreign(keys, family);
  const bool partial = family != nullptr && family->partial_rotary;
  const int64_t hidden = keys.size("%.embedding_length"), heads = keys.size("%.attention.head_count");
  const int64_t head_dim = head_dim_of(keys, hidden, heads, partial);
  const int64_t layers = keys.size("%.block_count");
  const bool has_heads = keys.has("%.attention.head_count_kv");
  const double theta = keys.number("%.rope.freq_base").value_or(10000);
  const bool own_rope = family != nullptr && family->own_rope;
  const auto scaling = [&] {
    const auto factors = read_rope_factors(file, keys, rope_factors_tensor, head_dim / 2);
    return rope_scaling_from_gguf(keys, factors, theta, head_dim);
  };
  const bool tied = !has(file, "output.weight");
  io::Json config = {
      {"architectures", {row.class_name}},
      {"model_type", row.model_type},
      {"vocab_size", rows_of(file, keys, "token_embd.weight")},
      {"hidden_size", hidden},
      {"intermediate_size", first_size(keys, "%.feed_forward_length", family, layers)},
      {"num_hidden_layers", layers},
      {"num_attention_heads", heads},
      {"num_key_value_heads", has_heads ? first_size(keys, "%.attention.head_count_kv", family, layers) : heads},
      {"head_dim", head_dim},
      {"hidden_act", "silu"},
      {"max_position_embeddings", keys.size("%.context_length")},
      {"rms_norm_eps", stated_eps(keys)},
      {"rope_theta", theta},
      {"rope_scaling", own_rope ? io::Json(nullptr) : scaling()},
      {"tie_word_embeddings", tied}};
  if (family == nullptr || !family->own_biases) add_biases(file, keys, row, config);
  if (partial) {
    config["partial_rotary_factor"] =
        static_cast<double>(keys.size("%.rope.dimension_count", head_dim)) / static_cast<double>(head_dim);
  }
  if (family != nullptr && family->read != nullptr) family->read(file, keys, config);
  if (row.windows == model::WindowRule::all_layers) {
    config["sliding_window"] = window == 0 ? io::Json(nullptr) : io::Json(window);  // 0 is a window to transformers
  }
  if (row.windows == model::WindowRule::from_layer) config["use_sliding_window"] = false;
  config["bos_token_id"] = optional_id(keys.integer("tokenizer.ggml.bos_token_id"));
  config["eos_token_id"] = eos_tokens(keys);
  config["torch_dtype"] = dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "float16" : "float32";
  return config;
}

std::vector<RopeFactors> rope_factors_to_gguf(const model::ModelConfig& config) {
  const model::RopeConfig& rope = config.rope;
  const auto floats = [](const std::vector<double>& values) {
    std::vector<float> result;
    for (const double value : values) result.push_back(static_cast<float>(value));
    return result;
  };
  if (rope.type == model::RopeType::llama3) return {{rope_factors_tensor, llama3_factors(rope, config.head_dim)}};
  if (rope.type == model::RopeType::longrope) {
    return {{rope_long_tensor, floats(rope.long_factors)}, {rope_short_tensor, floats(rope.short_factors)}};
  }
  if (rope.type != model::RopeType::proportional) return {};
  const auto wide = std::ranges::find(config.sliding_window, 0) - config.sliding_window.begin();
  return {{rope_factors_tensor, turning_factors(rope, config.attention_of(wide).head_dim)}};
}

io::GgufMetadata config_to_gguf(const model::ModelConfig& config, std::vector<std::string>& notes) {
  const std::string name(config.architecture->gguf);
  const GgufFamily* family = gguf_family(config.architecture->model_type);
  const int64_t inner = config.intermediate_size > 0 ? config.intermediate_size : config.mixture.intermediate;
  io::GgufMetadata metadata = {{name + ".block_count", u32(config.layers)},
                               {name + ".context_length", u32(config.max_positions)},
                               {name + ".embedding_length", u32(config.hidden_size)},
                               {name + ".feed_forward_length", u32(inner)},
                               {name + ".attention.head_count", u32(config.heads)},
                               {name + ".attention.head_count_kv", u32(config.kv_heads)},
                               {name + ".attention.layer_norm_rms_epsilon", static_cast<float>(config.rms_norm_eps)},
                               {name + ".attention.key_length", u32(config.head_dim)},
                               {name + ".attention.value_length", u32(config.head_dim)},
                               {name + ".rope.freq_base", static_cast<float>(config.rope.theta)},
                               {name + ".rope.dimension_count", u32(rotating(config))},
                               {name + ".vocab_size", u32(config.vocab_size)}};
  demand_activation(config);
  demand(std::ranges::all_of(config.attention, [](const auto& layer) { return layer.clip == 0; }), config, "clip_qkv");
  model::RopeConfig rope = config.rope;
  if (family != nullptr && family->partial_rotary) rope.partial_rotary_factor = 1;
  if (family == nullptr || !family->own_rope) rope_scaling_to_gguf(rope, name, metadata);
  if (rope.type == model::RopeType::yarn && !rope.truncate) {
    notes.emplace_back("yarn's bounds are no whole pairs in config.json; readers round them");
  }
  if (family != nullptr && family->write != nullptr) family->write(config, name + ".", metadata);
  if (config.output_bias && !config.architecture->gguf_stated_biases) {
    const std::string_view name_of_class = config.architecture->class_name;
    throw Error(ErrorCode::unsupported,
                concat("config.json: attention_bias of ", name_of_class.substr(0, name_of_class.find("ForCausalLM"))))
        .detail("GGUF readers have no such tensors");
  }
  if (family != nullptr && family->own_windows) return metadata;
  if (const int64_t window = common_window(config); window != 0) {
    metadata.push_back({name + ".attention.sliding_window", u32(window)});
    notes.push_back(concat("the sliding window of ", window, " positions is stated as ", name,
                           ".attention.sliding_window; readers that ignore it see all positions"));
  }
  return metadata;
}

}  // namespace w4q::gguf
