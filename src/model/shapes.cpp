#include "model/shapes.h"

#include "core/error.h"
#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {
namespace {

struct ShapeRow {
  std::string_view name;
  std::string_view model_type;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  double theta;
  bool tied, qk_norm;
};
constexpr ShapeRow shapes[] = {
    {"llama3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, false, false},
    {"llama2-7b", "llama", 4096, 11008, 32, 32, 32, 128, 32000, 1e4, false, false},
    {"mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 1e6, false, false},
    {"qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, false, true},
    {"llama3-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5, true, false},
    {"llama3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 5e5, false, false},
};

/// Sizes that take more than a row, as their config.json says them.
struct ConfigRow {
  std::string_view name;
  const char* config;
};
constexpr ConfigRow configs[] = {
    {"qwen3-30b-a3b", R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
      "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true, "rope_theta": 1000000})"},
    {"qwen3.6-35b-a3b", R"({"architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40,
      "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256,
      "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
      "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
      "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
      "rope_theta": 10000000})"},
    {"gpt-oss-20b", R"({"architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
      "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
      "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
      "attention_bias": true, "swiglu_limit": 7.0, "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn",
      "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "truncate": false}})"},
    {"qwen3.6-27b", R"({"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408,
      "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
      "vocab_size": 248320, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
      "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
      "rope_theta": 10000000})"},
};

}  // namespace

ModelConfig named_shape(std::string_view name) {
  for (const auto& row : shapes) {
    if (row.name != name) continue;
    ModelConfig config;
    config.architecture = &architecture_row(row.model_type);
    config.architecture_name = row.name;
    config.hidden_size = row.hidden;
    config.intermediate_size = row.intermediate;
    config.layers = row.layers;
    config.heads = row.heads;
    config.kv_heads = row.kv_heads;
    config.head_dim = row.head_dim;
    config.vocab_size = row.vocab;
    config.max_positions = int64_t{1} << 17;
    config.tied_embeddings = row.tied;
    config.qk_norm = row.qk_norm;
    config.rope.theta = row.theta;
    config.sliding_window.assign(static_cast<size_t>(row.layers), 0);
    return config;
  }
  for (const auto& row : configs) {
    if (row.name != name) continue;
    io::Json json = io::parse_json(row.config, name);
    json["max_position_embeddings"] = int64_t{1} << 18;
    json["tie_word_embeddings"] = false;
    ModelConfig config = parse_config(json, name);
    config.architecture_name = row.name;
    return config;
  }
  throw Error(ErrorCode::bad_argument, concat("--shape ", printable(name), ": unknown"))
      .detail("known: " + join(shape_names()));
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const auto& row : shapes) names.emplace_back(row.name);
  for (const auto& row : configs) names.emplace_back(row.name);
  return names;
}

}  // namespace w4q::model
