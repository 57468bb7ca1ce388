// Architectures as rows: what their config.json says and leaves unsaid, of which blocks their layers are, and what GGUF
// calls them. One file each in model/architecture, one list.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "model/layer_plan.h"

namespace w4q::model {

class ConfigReader;

/// Which linears have biases: never, where config.json says so, or always.
enum class BiasRule { never, stated, always };

/// Which layers have an attention window.
enum class WindowRule {
  none,
  all_layers,
  from_layer,  ///< with use_sliding_window those that layer_types says, or from max_window_layers on
  switched,    ///< with use_sliding_window all
};

/// What transformers takes for the sizes of a text_config that is silent about them: files of models that see or hear
/// often state what differs from that alone.
struct UsualSizes {
  int64_t vocabulary = 0, hidden = 0;
  int64_t intermediate = 0;  ///< 0: there are experts alone
  int64_t layers = 0, heads = 0;
};

/// The same for the sizes of a mixture, whoever is silent about them; 0: they must be stated.
struct UsualMixture {
  int64_t experts = 0, chosen = 0, intermediate = 0, shared = 0;
};

struct ArchitectureRow {
  std::string_view model_type;  ///< "llama"; of the text_config where it is wrapped
  std::string_view class_name;  ///< "LlamaForCausalLM"
  /// Models that see or hear beside it: its config is their text_config.
  std::array<std::string_view, 2> wrappers = {};
  UsualSizes sizes;
  UsualMixture mixture = {};

  // What it assumes where config.json is silent.
  std::optional<int64_t> kv_heads = {};  ///< nothing: as many as heads
  std::optional<int64_t> head_dim = {};  ///< nothing: hidden_size / heads
  int64_t max_positions = 0;
  double rope_theta = 10000;
  std::string_view rope_parameters = {};  ///< JSON
  int64_t original_positions = 0;  ///< original_max_position_embeddings of the file's top; 0: rope parameters say it
  double partial_rotary_factor = 1;
  bool partial_rotary = false;  ///< partial_rotary_factor is read; else heads turn as a whole
  double rms_norm_eps = 1e-6;
  int64_t window = 4096;          ///< sliding_window; 0: none
  bool biases_attention = false;  ///< attention_bias
  std::optional<int64_t> bos_token = {};
  std::optional<int64_t> eos_token = {};

  /// attention_bias: of q, k, v and o; always: of q, k and v.
  BiasRule attention_bias = BiasRule::never;
  BiasRule mlp_bias = BiasRule::never;  ///< mlp_bias
  bool qk_norm = false;                 ///< RMSNorm of queries and keys
  bool whole_qk_norm = false;           ///< of all heads as one
  WindowRule windows = WindowRule::none;
  bool lists_windows = false;                      ///< all_layers: by itself the model has them where layer_types says
  std::string_view activation_key = "hidden_act";  ///< empty: nothing says it
  std::string_view activation = "silu";            ///< where that is absent
  float norm_offset = 0;                           ///< PlannedNorm::offset of all norms
  bool scales_embedding = false;                   ///< by √hidden_size
  bool ties_head = false;                          ///< where tie_word_embeddings is absent
  bool only_experts = false;                       ///< intermediate_size may be absent
  bool reads_rope = false;                         ///< `read` reads the rotary embeddings, which differ between layers
  /// Positions of pictures turn other channels than those of text do: for text alone they are the same.
  bool text_mrope = false;
  std::string_view end_of_stack = {};  ///< behind the names of tensors in which experts are stacked: ".weight"

  std::string_view gguf = {};       ///< general.architecture; several rows may share one; empty: GGUF is not written
  bool gguf_rotary_pairs = false;   ///< GGUF stores channels of q and k that rotate together side by side
  bool gguf_stated_biases = false;  ///< GGUF has room for biases of attention that are stated
  std::string_view gguf_mlp_norm = "ffn_norm";  ///< the norm before an MLP or a mixture

  /// Reads keys of its own, after everything that is read for all; null: there are none.
  void (*read)(const ConfigReader& reader, ModelConfig& config) = nullptr;
  /// The blocks of a layer; positions are set by the caller.
  std::vector<Block> (*blocks)(const ModelConfig& config, int64_t layer) = nullptr;
};

std::span<const ArchitectureRow* const> architectures() noexcept;
/// Models that see or hear beside a text model of any architecture, whose config is their text_config.
std::span<const std::string_view> wrappers_of_any() noexcept;
/// The row of a model_type that is there.
const ArchitectureRow& architecture_row(std::string_view model_type);

}  // namespace w4q::model
