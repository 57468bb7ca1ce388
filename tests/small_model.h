// A small random model of every architecture that is listed, as a folder: laws run over all of them, and a new row is
// tested on arrival.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "core/text.h"
#include "io/checkpoint_writer.h"
#include "model/architecture.h"
#include "model/opened.h"
#include "model/parameters.h"
#include "pooled_normal.h"

namespace w4q::test {

/// What its config.json has beyond the sizes that all have.
inline const std::map<std::string, std::string>& small_configs() {
  static const std::string delta = R"("linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "head_dim": 32, "partial_rotary_factor": 0.25)";
  static const std::string experts =
      R"("num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true)";
  static const std::string local = R"("num_local_experts": 4, "num_experts_per_tok": 2)";
  static const std::string shared = R"("shared_expert_intermediate_size": 64)";
  static const std::map<std::string, std::string> configs = {
      {"llama", ""},
      {"mistral", R"("sliding_window": 6)"},
      {"ministral3", R"("rope_parameters": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 8,
        "rope_theta": 10000, "llama_4_scaling_beta": 0.1})"},
      {"mixtral", local},
      {"qwen2", ""},
      {"qwen2_moe", experts + ", " + shared + R"(, "mlp_only_layers": [0])"},
      {"qwen3", R"("head_dim": 32)"},
      {"qwen3_moe", experts + R"(, "head_dim": 32)"},
      {"qwen3_next", delta + ", " + experts + ", " + shared},
      {"qwen3_5_text", delta},
      {"qwen3_5_moe_text", delta + ", " + experts + ", " + shared},
      {"qwen3_vl_text", R"("head_dim": 32, "rope_scaling": {"mrope_section": [6, 5, 5], "rope_type": "default"})"},
      {"qwen3_vl_moe_text", experts + R"(, "head_dim": 32)"},
      {"gemma2", R"("head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0)"},
      {"gemma3_text", R"("head_dim": 32, "sliding_window": 6, "sliding_window_pattern": 3, "rope_theta": 1000000)"},
      {"gemma4_text", R"("head_dim": 32, "global_head_dim": 64, "sliding_window": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 160, "use_double_wide_mlp": true, "final_logit_softcapping": 5.0,
        "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
        "rope_theta": 1000000}, "sliding_attention": {"rope_type": "default", "rope_theta": 10000}})"},
      {"gpt_oss", local + R"(, "head_dim": 32, "sliding_window": 6, "attention_bias": true, "swiglu_limit": 1.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "truncate": false})"},
      {"glm4", R"("head_dim": 32, "attention_bias": true, "partial_rotary_factor": 0.5)"},
      {"glm4_moe", R"("head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qk_norm": true)"},
      {"minimax_m2", local + R"(, "head_dim": 32, "rotary_dim": 16)"},
      {"phi3", ""},
      {"smollm3", ""},
      {"olmo2", ""},
      {"olmo3", R"("sliding_window": 6, "rope_theta": 500000)"},
      {"exaone4", R"("sliding_window": 6, "head_dim": 32)"},
      {"granitemoe", local + R"(, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 3.0,
        "attention_multiplier": 0.0625)"},
      {"granite", R"("embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 3.0,
        "attention_multiplier": 0.0625)"},
      {"ernie4_5", R"("head_dim": 32, "use_bias": true)"},
      {"seed_oss", R"("head_dim": 32, "attention_out_bias": true)"},
      {"olmoe", R"("num_experts": 4, "num_experts_per_tok": 2)"},
      {"qwen2_vl_text", R"("rope_scaling": {"mrope_section": [4, 2, 2], "type": "mrope"})"},
      {"qwen2_5_vl_text", R"("rope_scaling": {"mrope_section": [4, 2, 2], "type": "mrope"})"},
      {"gemma", R"("head_dim": 32, "hidden_act": "gelu")"},
      {"glm", R"("head_dim": 32, "partial_rotary_factor": 0.5)"},
      {"glm4v_text",
       R"("head_dim": 32, "partial_rotary_factor": 0.5, "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"})"},
      {"glm4v_moe_text",
       R"("head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"})"},
      {"dots1", R"("head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "norm_topk_prob": true)"},
      {"ernie4_5_moe", R"("moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1)"},
  };
  return configs;
}

/// `changes` are keys in the place of others.
inline io::Json small_config(const model::ArchitectureRow& row, const io::Json& changes = io::Json::object()) {
  const std::string& own = small_configs().at(std::string(row.model_type));
  io::Json config = io::parse_json("{" + own + "}", "small_configs");
  const io::Json common = {{"hidden_size", 64},
                           {"intermediate_size", 96},
                           {"num_hidden_layers", 4},
                           {"num_attention_heads", 4},
                           {"num_key_value_heads", 2},
                           {"vocab_size", 160},
                           {"max_position_embeddings", 512},
                           {"rms_norm_eps", 1e-6},
                           {"tie_word_embeddings", false},
                           {"rope_theta", 10000},
                           {"torch_dtype", "bfloat16"}};
  for (const auto& [key, value] : common.items()) {
    if (!config.contains(key)) config[key] = value;
  }
  config["architectures"] = {std::string(row.class_name)};
  config["model_type"] = std::string(row.model_type);
  config.update(changes);
  return config;
}

/// Tensors as they stand in the file: experts that are parameters by themselves make up stacks.
inline std::map<std::string, Shape> small_tensors(const model::ModelConfig& config) {
  std::map<std::string, Shape> tensors;
  const bool stacked = config.mixture.experts > 0 && config.mixture.storage != model::ExpertStorage::by_name;
  for (const auto& parameter : model::parameters(config)) {
    const std::string module(model::module_path(parameter.name));
    const bool expert = stacked && model::layer_numbers(module).expert >= 0;
    if (!expert) {
      tensors[parameter.name] = parameter.shape;
      continue;
    }
    const bool inputs_first = config.mixture.storage == model::ExpertStorage::stacked_in_turn;
    const int64_t n = parameter.shape[0], k = parameter.shape[1];
    const std::string stack = concat(module.substr(0, module.rfind('.')), config.architecture->end_of_stack);
    tensors[stack] = {config.mixture.experts, inputs_first ? k : n, inputs_first ? n : k};
  }
  return tensors;
}

/// Norms around one (or what they add to one), weights of variance 1/k, everything BF16.
inline void write_small_model(const model::ArchitectureRow& row, const std::filesystem::path& folder,
                              const io::Json& changes = io::Json::object()) {
  std::filesystem::create_directories(folder);
  const io::Json json = small_config(row, changes);
  std::ofstream(folder / "config.json") << json.dump(2);
  const auto config = model::parse_config(json, "small");
  const auto tensors = small_tensors(config);
  std::vector<io::PlannedTensor> planned;
  for (const auto& [name, shape] : tensors) planned.push_back({name, DType::bf16, shape});
  io::CheckpointWriter writer(folder, planned, {});
  uint64_t seed = 0;
  for (const auto& [name, shape] : tensors) {
    ++seed;
    const bool norm = name.ends_with("norm.weight") || name.find("layernorm") != std::string::npos;
    const bool around_one = norm || name.ends_with("layer_scalar");
    const double middle =
        around_one ? 1.0 - double{row.norm_offset} * (name.find("linear_attn") == std::string::npos) : 0.0;
    const double spread = shape.size() < 2 ? 0.2 : 1.0 / std::sqrt(static_cast<double>(shape.back()));
    std::vector<uint16_t> values(static_cast<size_t>(element_count(shape)));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = bf16_from_f32(static_cast<float>(middle + spread * pooled_normal(seed, i)));
    }
    writer.write(name, bytes_of(values));
  }
  writer.finish();
}

/// "qwen3_5_text", as a part of a test's name.
inline std::string row_name(const model::ArchitectureRow* row) { return std::string(row->model_type); }

}  // namespace w4q::test
