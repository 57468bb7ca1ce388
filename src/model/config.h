// config.json of the architectures that are listed (architecture.h), in the older style (rope_scaling, torch_dtype) and
// the newer one (rope_parameters, dtype), by itself or as the text_config of a model that also sees or hears.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "io/json.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/elementwise/gates.h"

namespace w4q::model {

struct ArchitectureRow;  // model/architecture.h

using kernels::Activation;

/// `proportional`: pairs as far apart as half a head, of which the first ones turn, with exponents over the whole head.
enum class RopeType { standard, linear, dynamic, llama3, yarn, longrope, proportional };

/// Rotary embedding parameters, with every default filled in (docs/model.md).
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;  ///< 0: nothing turns
  bool neighbours = false;             ///< channels 2i and 2i + 1 turn together, not i and i + d/2
  double factor = 1.0;
  double low_freq_factor = 1.0;        // llama3
  double high_freq_factor = 4.0;       // llama3
  int64_t original_max_positions = 0;  ///< dynamic: max_position_embeddings
  double beta_fast = 32.0;             // yarn
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 1.0;  ///< multiplies cos and sin
  /// longrope: divisors of the frequencies of each pair, within the original positions and beyond.
  std::vector<double> short_factors = {}, long_factors = {};
  /// Of models that see: pairs that turn with each of a picture's positions, as mrope_section says. Text minds none of it.
  std::vector<int64_t> picture_pairs = {};

  bool operator==(const RopeConfig&) const = default;
};

/// Attention of one layer.
struct AttentionConfig {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t window = 0;  ///< keys older than this many positions are not seen; 0: all are
  RopeConfig rope = {};
  double scale = 0;     ///< of logits; 0: 1/√head_dim
  double soft_cap = 0;  ///< kernels::AttentionOptions::soft_cap
  double clip = 0;      ///< queries, keys and values are cut off at ± this, before they turn; 0: they are not
  /// Queries are multiplied by 1 + temperature · ln(1 + ⌊position / temperature_length⌋).
  double temperature = 0;
  int64_t temperature_length = 1;
  bool output_gate = false;             ///< q_proj has as many rows of gates, head by head behind each query
  bool sinks = false;                   ///< kernels::AttentionOptions::sinks
  bool keys_are_values = false;         ///< values are keys before their norm and rotation: there is no v_proj
  bool value_norm = false;              ///< RMSNorm without a weight of each head of values
  std::optional<int64_t> keys_of = {};  ///< the layer whose keys and values are read: this one has none of its own

  int64_t groups() const noexcept { return heads / kv_heads; }

  bool operator==(const AttentionConfig&) const = default;
};

/// How a router turns its logits into the shares of the experts that it chooses.
enum class Scoring { softmax, sigmoid };
/// How experts stand in the files: each by its own name, or in one tensor [experts, …] with gates and ups as one matrix,
/// one half after the other or in turn.
enum class ExpertStorage { by_name, stacked_halves, stacked_in_turn };

struct MixtureConfig {
  int64_t experts = 0, chosen = 0;
  int64_t intermediate = 0;         ///< of an expert
  int64_t shared_intermediate = 0;  ///< of what every token goes through; 0: nothing
  Scoring scoring = Scoring::softmax;
  bool renormalizes = false;  ///< shares of the chosen ones add up to 1
  double scale = 1;           ///< of shares
  /// Experts stand in so many groups, of which some are chosen first, by the sum of their two best scores.
  int64_t groups = 1, chosen_groups = 1;
  ExpertStorage storage = ExpertStorage::by_name;
  bool stacks_alone = false;  ///< readers of 16 bit know the experts as stacks, and under no names of their own

  bool operator==(const MixtureConfig&) const = default;
};

/// Where the tensors of the text model stand: "model.layers.0.…", and the head.
struct TensorNames {
  std::string prefix = "model.";
  std::string head = "lm_head";

  bool operator==(const TensorNames&) const = default;
};

struct ModelConfig {
  const ArchitectureRow* architecture = nullptr;  ///< null: none that can be decoded, and `undecoded` says why
  std::string architecture_name;                  ///< "LlamaForCausalLM"
  std::string undecoded;                          ///< "MODEL/config.json: architecture \"GlmForCausalLM\" …"
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  /// The head is the embedding table. Nothing: the file does not say, and the head is untied where one is stored.
  std::optional<bool> tie_word_embeddings;
  bool tied_embeddings = false;
  bool qkv_bias = false;
  bool output_bias = false;  ///< bias of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;
  RopeConfig rope;
  TensorNames names;
  Activation activation = Activation::silu;
  double activation_limit = 0;      ///< kernels::Gating::limit
  double activation_slope = 1.702;  ///< kernels::Gating::slope
  double embedding_scale = 1;       ///< of embeddings
  double residual_scale = 1;        ///< of what is added to the residual stream
  double logit_scale = 1;           ///< of logits
  double logit_cap = 0;             ///< c: logits become c · tanh(logits / c); 0: they stay
  /// Where layers differ in more than the window, each layer's; else empty: attention_of().
  std::vector<AttentionConfig> attention;
  std::vector<int64_t> intermediate_sizes;  ///< where layers differ, each layer's; else empty
  std::vector<bool> delta_layers;           ///< which have a gated delta net in the place of attention; empty: none
  kernels::DeltaShape delta;
  std::vector<bool> mixture_layers;  ///< which have a mixture of experts; empty: none
  MixtureConfig mixture;
  int64_t layer_embedding_size = 0;  ///< of the embeddings that each layer has of its own; 0: none
  int64_t layer_vocab_size = 0;      ///< rows of their table
  std::optional<DType> dtype;  ///< torch_dtype or dtype, what the producer computed in; nothing when absent or unusual
  /// Per layer: keys older than this many positions are not seen; 0 means all are.
  std::vector<int64_t> sliding_window;
  std::optional<int64_t> bos_token;
  std::vector<int64_t> eos_tokens;
  std::vector<std::string> warnings;

  int64_t groups() const noexcept { return heads / kv_heads; }
  /// Ids below this have embeddings.
  int64_t known_ids() const noexcept {
    return layer_embedding_size == 0 ? vocab_size : std::min(vocab_size, layer_vocab_size);
  }
  AttentionConfig attention_of(int64_t layer) const;
  int64_t intermediate_of(int64_t layer) const;
  bool has_delta_net(int64_t layer) const { return !delta_layers.empty() && delta_layers[static_cast<size_t>(layer)]; }
  bool has_mixture(int64_t layer) const {
    return !mixture_layers.empty() && mixture_layers[static_cast<size_t>(layer)];
  }
};

/// The most positions of a sequence that the model was made for, those that rope scaling adds included; nothing where
/// the scaling follows the length (dynamic).
std::optional<int64_t> most_positions(const ModelConfig& config) noexcept;

/// Reads and checks a config. `source` names it in messages. Throws bad_file (missing or absurd values: hostile sizes,
/// heads not divisible …) and unsupported (another architecture, activation or rope type), naming the key.
ModelConfig parse_config(const io::Json& config, std::string_view source);
/// parse_config of `folder`/config.json, `config` where that is read already; end-of-sequence tokens come from
/// generation_config.json where it names some.
ModelConfig read_config(const io::Json& config, const std::filesystem::path& folder);
ModelConfig read_config(const std::filesystem::path& folder);
/// read_config, or where that would throw unsupported a config without an architecture, that says why.
ModelConfig read_any_config(const io::Json& config, const std::filesystem::path& folder);
/// Throws unsupported, with the reason, where nothing can decode the model. `what` needs that: "calibration".
void require_decoder(const ModelConfig& config, std::string_view what);

}  // namespace w4q::model
