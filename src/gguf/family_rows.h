// What the rows of families.cpp share, and those that stand in files of their own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/families.h"

namespace w4q::gguf {

/// Readers of the architecture assume this, whatever a file could say: throws unsupported with `what` unless it holds.
void demand(bool holds, const model::ModelConfig& config, std::string_view what);
/// Readers load no file of it whose head is the embedding table.
void demand_own_head(const model::ModelConfig& config);
/// `value` under this key, in the place of the one that is there.
void set(io::GgufMetadata& metadata, const std::string& key, io::GgufValue value);

/// Softmax over experts; the shares of the chosen ones add up to one, or stay as they are. Layers before `dense_layers`
/// have none.
void write_mixture(const model::ModelConfig& config, const std::string& prefix, bool renormalizes, int64_t dense_layers,
                   io::GgufMetadata& metadata);
void write_expert_size(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
/// layer_types of as many layers as `config` has: `often`, and `seldom` of each `interval`-th. Throws bad_file for an
/// absurd number.
io::Json layer_types(const GgufKeys& keys, const io::Json& config, int64_t interval, std::string_view often,
                     std::string_view seldom);
void read_experts(const GgufKeys& keys, bool renormalizes, io::Json& config);
/// Biases of q, k and v alone: attention_bias where the first layer has them.
void read_qkv_biases(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
/// Values of expert_gating_func: of scores that are sigmoids. Throws unsupported for a file that states another.
inline constexpr uint32_t sigmoid_gating = 2;
void demand_sigmoid(const GgufKeys& keys);

/// Which pairs of a head turn with which of a picture's positions, in rope.dimension_sections; `otherwise` where
/// config.json is silent. Throws unsupported unless these are three parts of all that turn.
void write_picture_pairs(const model::ModelConfig& config, const std::string& prefix, std::vector<int64_t> otherwise,
                         io::GgufMetadata& metadata);
/// Each third pair in turn.
std::vector<int64_t> thirds_in_turn(const model::ModelConfig& config);
/// rope_parameters of config.json, in the place of rope_scaling. `in_turn`: mrope_interleaved.
void read_picture_pairs(const GgufKeys& keys, bool in_turn, io::Json& config);

void write_glm(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void write_glm4_moe(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_glm4_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void write_glm4v(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_glm4v(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void write_glm4v_moe(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_glm4v_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void write_dots1(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_dots1(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_qwen3_5(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void write_qwen3_5_moe(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void write_qwen3_next(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_qwen3_5(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void read_qwen3_5_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
/// The text models of those that see.
void write_qwen2_vl(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_qwen2_vl(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void write_qwen3_vl(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void write_qwen3_vl_moe(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_qwen3_vl(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void read_qwen3_vl_moe(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);
void read_qwen3_next(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_gemma4(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_gemma4(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_gpt_oss(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_gpt_oss(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_ministral3(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_ministral3(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_olmo2(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void write_olmo3(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_olmo3(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

void write_phi3(const model::ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
void read_phi3(const io::GgufFile& file, const GgufKeys& keys, io::Json& config);

}  // namespace w4q::gguf
