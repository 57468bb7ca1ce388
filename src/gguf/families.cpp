#include "gguf/families.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/text.h"
#include "gguf/family_rows.h"
#include "model/architecture.h"

namespace w4q::gguf {
using model::ModelConfig;

void demand(bool holds, const ModelConfig& config, std::string_view what) {
  if (holds) return;
  throw Error(ErrorCode::unsupported, concat("config.json: ", what))
      .detail(concat("GGUF's architecture ", config.architecture->gguf, " cannot say it"))
      .hint("llama.cpp could not run it: repack or quantize --to another format, which other programs load");
}

void demand_own_head(const ModelConfig& config) {
  demand(!config.tied_embeddings, config, "a head that is the embedding table");
}

void set(io::GgufMetadata& metadata, const std::string& key, io::GgufValue value) {
  const auto found = std::ranges::find(metadata, key, &io::GgufEntry::key);
  if (found == metadata.end()) {
    metadata.push_back({key, std::move(value)});
  } else {
    found->value = std::move(value);
  }
}

io::Json layer_types(const GgufKeys& keys, const io::Json& config, int64_t interval, std::string_view often,
                     std::string_view seldom) {
  constexpr int64_t most = 1 << 16;
  const auto layers = config.at("num_hidden_layers").get<int64_t>();
  if (layers > most) throw keys.error(ErrorCode::bad_file, "%.block_count", concat("is ", layers));
  io::Json types = io::Json::array();
  for (int64_t layer = 1; layer <= layers; ++layer) types.push_back(layer % interval == 0 ? seldom : often);
  return types;
}

// ---- mixtures -------------------------------------------------------------------------------------------------------

void write_mixture(const ModelConfig& config, const std::string& prefix, bool renormalizes, int64_t dense_layers,
                   io::GgufMetadata& metadata) {
  const auto& mixture = config.mixture;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    demand(config.has_mixture(layer) == (layer >= dense_layers), config, concat("layer ", layer, " without experts"));
  }
  demand(mixture.renormalizes == renormalizes, config, concat("norm_topk_prob ", mixture.renormalizes));
  demand(mixture.groups == 1, config, "experts in groups");
  metadata.push_back({prefix + "expert_count", u32(mixture.experts)});
  metadata.push_back({prefix + "expert_used_count", u32(mixture.chosen)});
}

void write_expert_size(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  metadata.push_back({prefix + "expert_feed_forward_length", u32(config.mixture.intermediate)});
}

void read_qkv_biases(const io::GgufFile& file, const GgufKeys&, io::Json& config) {
  config["attention_bias"] = has(file, "blk.0.attn_q.bias");
}

void read_experts(const GgufKeys& keys, bool renormalizes, io::Json& config) {
  config["num_experts"] = keys.size("%.expert_count");
  config["num_experts_per_tok"] = keys.size("%.expert_used_count");
  config["norm_topk_prob"] = renormalizes;
}

namespace {

constexpr std::array<std::string_view, 1> expert_keys = {"%.expert_count"};
constexpr std::array<std::string_view, 2> weighed_expert_keys = {"%.expert_count", "%.expert_weights_scale"};

void write_mixtral(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_mixture(config, prefix, true, 0, metadata);
}

void read_mixtral(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["num_local_experts"] = keys.size("%.expert_count");
  config["num_experts_per_tok"] = keys.size("%.expert_used_count");
}

void write_qwen3_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
}

void read_qwen3_moe(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  read_experts(keys, true, config);
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
}

void write_qwen2_moe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand_own_head(config);
  write_mixture(config, prefix, false, 0, metadata);
  write_expert_size(config, prefix, metadata);
  metadata.push_back({prefix + "expert_shared_feed_forward_length", u32(config.mixture.shared_intermediate)});
}

void read_qwen2_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  read_experts(keys, false, config);
  config["moe_intermediate_size"] = keys.size("%.expert_feed_forward_length");
  config["shared_expert_intermediate_size"] = keys.size("%.expert_shared_feed_forward_length");
  config["qkv_bias"] = has(file, "blk.0.attn_q.bias");
}

void write_olmoe(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  write_mixture(config, prefix, false, 0, metadata);
  demand(config.kv_heads == config.heads, config, "fewer key than query heads");
  demand_own_head(config);
}

void read_olmoe(const io::GgufFile&, const GgufKeys& keys, io::Json& config) { read_experts(keys, false, config); }

void write_minimax_m2(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand_own_head(config);
  write_mixture(config, prefix, true, 0, metadata);
  write_expert_size(config, prefix, metadata);
  metadata.push_back({prefix + "expert_gating_func", sigmoid_gating});
}

void read_minimax_m2(const io::GgufFile& file, const GgufKeys& keys, io::Json& config) {
  demand_sigmoid(keys);
  read_mixtral(file, keys, config);
  config["intermediate_size"] = keys.size("%.expert_feed_forward_length");
  config["rotary_dim"] = keys.size("%.rope.dimension_count");
}

// ---- multipliers, biases, layers that do not turn -------------------------------------------------------------------

constexpr std::array<std::string_view, 4> granite_keys = {"%.attention.scale", "%.embedding_scale", "%.residual_scale",
                                                          "%.logit_scale"};

void write_granite(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand(!config.mlp_bias, config, "mlp_bias");
  metadata.push_back({prefix + "attention.scale", static_cast<float>(config.attention.front().scale)});
  metadata.push_back({prefix + "embedding_scale", static_cast<float>(config.embedding_scale)});
  metadata.push_back({prefix + "residual_scale", static_cast<float>(config.residual_scale)});
  metadata.push_back({prefix + "logit_scale", static_cast<float>(1 / config.logit_scale)});
}

void read_granite(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["attention_multiplier"] = keys.number("%.attention.scale").value_or(1);
  config["embedding_multiplier"] = keys.number("%.embedding_scale").value_or(1);
  config["residual_multiplier"] = keys.number("%.residual_scale").value_or(1);
  config["logits_scaling"] = keys.number("%.logit_scale").value_or(1);
}

void write_seed_oss(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  demand(!config.mlp_bias, config, "mlp_bias");
}

void write_ernie4_5(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  demand(!config.qkv_bias, config, "use_bias");
}

void write_smollm3(const ModelConfig& config, const std::string&, io::GgufMetadata&) {
  demand(!config.mlp_bias, config, "mlp_bias");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const bool turns = config.attention_of(layer).rope.partial_rotary_factor != 0;
    demand(turns == ((layer + 1) % 4 != 0), config, concat("no_rope_layers of layer ", layer));
  }
}

// ---- Gemma ----------------------------------------------------------------------------------------------------------

/// Readers take the scale of attention from the number of layers: that of a head but for the largest model.
void demand_gemma_scale(const ModelConfig& config, int64_t largest) {
  const auto width =
      static_cast<double>(config.layers == largest ? config.hidden_size / config.heads : config.head_dim);
  const double found = config.attention.front().scale;
  demand(std::abs(found * std::sqrt(width) - 1) < 1e-6, config,
         concat("query_pre_attn_scalar ", std::llround(1 / (found * found)), ", where readers take ", width));
}

/// `global(layer)`: whether readers let it see everything.
void write_gemma_windows(const ModelConfig& config, const std::string& prefix, bool (*global)(int64_t layer),
                         io::GgufMetadata& metadata) {
  const int64_t window = *std::ranges::max_element(config.sliding_window);
  demand(window > 0, config, "sliding_window");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const int64_t expected = global(layer) ? 0 : window;
    demand(config.sliding_window[static_cast<size_t>(layer)] == expected, config,
           concat("the window of layer ", layer));
  }
  metadata.push_back({prefix + "attention.sliding_window", u32(window)});
}

void demand_tied_head(const ModelConfig& config) {
  demand(config.tied_embeddings, config, "a head that is not the embedding table");
}

void write_gemma(const ModelConfig& config, const std::string&, io::GgufMetadata&) { demand_tied_head(config); }

void read_gemma(const io::GgufFile&, const GgufKeys&, io::Json& config) {
  config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh";
}

constexpr std::array<std::string_view, 2> cap_keys = {"%.attn_logit_softcapping", "%.final_logit_softcapping"};

void write_gemma2(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand_gemma_scale(config, 46);
  demand_tied_head(config);
  write_gemma_windows(
      config, prefix, [](int64_t layer) { return layer % 2 == 1; }, metadata);
  const double cap = config.attention.front().soft_cap;
  demand(cap > 0 && config.logit_cap > 0, config, "soft caps that are taken away");
  metadata.push_back({prefix + "attn_logit_softcapping", static_cast<float>(cap)});
  metadata.push_back({prefix + "final_logit_softcapping", static_cast<float>(config.logit_cap)});
}

/// The width whose root divides logits of attention, as readers take it.
int64_t gemma_scalar(const io::Json& config, int64_t largest) {
  const auto size = [&](const char* key) { return config.at(key).get<int64_t>(); };
  return size("num_hidden_layers") == largest ? size("hidden_size") / size("num_attention_heads") : size("head_dim");
}

void read_gemma2(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["hidden_activation"] = "gelu_pytorch_tanh";
  config["query_pre_attn_scalar"] = gemma_scalar(config, 46);
  config["sliding_window"] = keys.size("%.attention.sliding_window");
  config["attn_logit_softcapping"] = keys.number("%.attn_logit_softcapping").value_or(50);
  config["final_logit_softcapping"] = keys.number("%.final_logit_softcapping").value_or(30);
}

constexpr std::array<std::string_view, 1> gemma3_keys = {"%.final_logit_softcapping"};
constexpr double local_theta = 10000;

void write_gemma3(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  demand_gemma_scale(config, 62);
  write_gemma_windows(
      config, prefix, [](int64_t layer) { return layer % 6 == 5; }, metadata);
  const auto& local = config.attention.front().rope;
  demand(local == model::RopeConfig{.theta = local_theta, .original_max_positions = local.original_max_positions},
         config, "rope_local_base_freq");
  demand(config.logit_cap == 0, config, "final_logit_softcapping");
}

void read_gemma3(const io::GgufFile&, const GgufKeys& keys, io::Json& config) {
  config["hidden_activation"] = "gelu_pytorch_tanh";
  config["query_pre_attn_scalar"] = gemma_scalar(config, 62);
  config["sliding_window"] = keys.size("%.attention.sliding_window");
  config["sliding_window_pattern"] = 6;
  config["rope_local_base_freq"] = keys.number("%.rope.freq_base_swa").value_or(local_theta);
  config["final_logit_softcapping"] = nullptr;
}

constexpr std::array<std::string_view, 2> gemma4_keys = {"%.expert_count", "%.final_logit_softcapping"};

constexpr std::array<GgufFamily, 31> families{{
    {.model_type = "mixtral", .mixture = true, .keys = expert_keys, .write = write_mixtral, .read = read_mixtral},
    {.model_type = "qwen3_moe", .mixture = true, .keys = expert_keys, .write = write_qwen3_moe, .read = read_qwen3_moe},
    {.model_type = "qwen2_moe",
     .mixture = true,
     .own_biases = true,
     .keys = expert_keys,
     .write = write_qwen2_moe,
     .read = read_qwen2_moe},
    {.model_type = "olmoe", .mixture = true, .keys = expert_keys, .write = write_olmoe, .read = read_olmoe},
    {.model_type = "glm4_moe",
     .mixture = true,
     .own_biases = true,
     .partial_rotary = true,
     .keys = weighed_expert_keys,
     .write = write_glm4_moe,
     .read = read_glm4_moe},
    {.model_type = "minimax_m2",
     .mixture = true,
     .partial_rotary = true,
     .keys = expert_keys,
     .write = write_minimax_m2,
     .read = read_minimax_m2},
    {.model_type = "granite", .keys = granite_keys, .write = write_granite, .read = read_granite},
    {.model_type = "seed_oss", .own_biases = true, .write = write_seed_oss, .read = read_qkv_biases},
    {.model_type = "glm", .own_biases = true, .partial_rotary = true, .write = write_glm, .read = read_qkv_biases},
    {.model_type = "glm4", .own_biases = true, .partial_rotary = true, .read = read_qkv_biases},
    {.model_type = "glm4v_text",
     .sees = true,
     .own_biases = true,
     .partial_rotary = true,
     .halves_pairs = true,
     .write = write_glm4v,
     .read = read_glm4v},
    {.model_type = "glm4v_moe_text",
     .mixture = true,
     .sees = true,
     .own_biases = true,
     .partial_rotary = true,
     .keys = weighed_expert_keys,
     .write = write_glm4v_moe,
     .read = read_glm4v_moe},
    {.model_type = "dots1",
     .mixture = true,
     .own_biases = true,
     .keys = weighed_expert_keys,
     .write = write_dots1,
     .read = read_dots1},
    {.model_type = "qwen2_vl_text", .sees = true, .write = write_qwen2_vl, .read = read_qwen2_vl},
    {.model_type = "qwen2_5_vl_text", .sees = true, .write = write_qwen2_vl, .read = read_qwen2_vl},
    {.model_type = "gemma", .write = write_gemma, .read = read_gemma},
    {.model_type = "ernie4_5", .write = write_ernie4_5},
    {.model_type = "smollm3", .write = write_smollm3},
    {.model_type = "olmo2", .write = write_olmo2},
    {.model_type = "olmo3", .own_windows = true, .write = write_olmo3, .read = read_olmo3},
    {.model_type = "ministral3", .own_rope = true, .write = write_ministral3, .read = read_ministral3},
    {.model_type = "qwen3_vl_text", .write = write_qwen3_vl, .read = read_qwen3_vl},
    {.model_type = "qwen3_vl_moe_text",
     .mixture = true,
     .keys = expert_keys,
     .write = write_qwen3_vl_moe,
     .read = read_qwen3_vl_moe},
    {.model_type = "phi3", .partial_rotary = true, .own_rope = true, .write = write_phi3, .read = read_phi3},
    {.model_type = "gpt_oss",
     .mixture = true,
     .own_windows = true,
     .own_rope = true,
     .keys = expert_keys,
     .write = write_gpt_oss,
     .read = read_gpt_oss},
    {.model_type = "qwen3_next",
     .mixture = true,
     .partial_rotary = true,
     .keys = expert_keys,
     .write = write_qwen3_next,
     .read = read_qwen3_next},
    {.model_type = "qwen3_5_text",
     .partial_rotary = true,
     .tiles_heads = true,
     .write = write_qwen3_5,
     .read = read_qwen3_5},
    {.model_type = "qwen3_5_moe_text",
     .mixture = true,
     .partial_rotary = true,
     .tiles_heads = true,
     .keys = expert_keys,
     .write = write_qwen3_5_moe,
     .read = read_qwen3_5_moe},
    {.model_type = "gemma4_text",
     .own_windows = true,
     .own_sizes = true,
     .own_rope = true,
     .joins_experts = true,
     .keys = gemma4_keys,
     .write = write_gemma4,
     .read = read_gemma4},
    {.model_type = "gemma2", .own_windows = true, .keys = cap_keys, .write = write_gemma2, .read = read_gemma2},
    {.model_type = "gemma3_text", .own_windows = true, .keys = gemma3_keys, .write = write_gemma3, .read = read_gemma3},
}};

}  // namespace

const GgufFamily* gguf_family(std::string_view model_type) noexcept {
  const auto found = std::ranges::find(families, model_type, &GgufFamily::model_type);
  return found == families.end() ? nullptr : &*found;
}

}  // namespace w4q::gguf
