// What config.json of several architectures says in the same words; a row's `read` asks for what it has.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/config_reader.h"

namespace w4q::model {

inline constexpr std::string_view full_attention = "full_attention", sliding_attention = "sliding_attention",
                                  linear_attention = "linear_attention";
/// Whether the shares of the experts that are chosen are made to add up to one.
inline constexpr std::string_view norm_topk_prob = "norm_topk_prob";

/// layer_types, or `otherwise` of each layer where it is absent. Throws unsupported for a type that is not `known`, bad_file
/// for a list of another length.
std::vector<std::string> read_layer_types(const ConfigReader& reader, const ModelConfig& config,
                                          std::initializer_list<std::string_view> known,
                                          const std::function<std::string_view(int64_t layer)>& otherwise);

/// Windows of sliding_window positions for layers of that type.
void set_windows(const ConfigReader& reader, const std::vector<std::string>& types, int64_t otherwise,
                 ModelConfig& config);

/// Fills ModelConfig::attention with what is the same in all layers, for a row to change.
void spread_attention(ModelConfig& config);

/// Gemma's use_bidirectional_attention: throws unsupported where a text attends to what comes later.
void refuse_later_tokens(const ConfigReader& reader);

/// A size, or with a warning the usual one where nothing states it; 0: it must be stated.
int64_t size_or_usual(const ConfigReader& reader, std::string_view key, int64_t usual, ModelConfig& config);

/// Keys of a mixture by the names that an architecture has for them.
struct MixtureKeys {
  std::string_view experts = "num_experts", chosen = "num_experts_per_tok", intermediate = "moe_intermediate_size";
  std::string_view shared_intermediate = {};
  std::string_view renormalizing = {};  ///< norm_topk_prob; empty: nothing says it
  bool renormalizes = true;             ///< where that is absent
};
/// Throws bad_file where more are chosen than there are.
void read_mixture(const ConfigReader& reader, const MixtureKeys& keys, ModelConfig& config);

/// Qwen's mlp_only_layers and decoder_sparse_step: layers without a mixture. Throws bad_file for what is no layer.
void leave_dense(const ConfigReader& reader, ModelConfig& config);

/// linear_num_key_heads, … of a gated delta net, and which layers have it in the place of attention: those of type linear_attention, or all but each
/// full_attention_interval-th; and that the others' queries come with gates.
void read_hybrid_layers(const ConfigReader& reader, ModelConfig& config);

}  // namespace w4q::model
