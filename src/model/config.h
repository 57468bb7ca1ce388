// config.json of Llama, Mistral, Qwen2 and Qwen3 checkpoints, in the older style (rope_scaling, torch_dtype) and the
// newer one (rope_parameters, dtype).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "io/json.h"

namespace w4q::model {

struct ArchitectureRow;  // model/architecture.h

/// What gated MLPs do to their gates.
enum class Activation { silu };

enum class RopeType { standard, linear, dynamic, llama3, yarn };

/// Rotary embedding parameters, with every default filled in (docs/model.md).
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;        // llama3
  double high_freq_factor = 4.0;       // llama3
  int64_t original_max_positions = 0;  ///< dynamic: max_position_embeddings
  double beta_fast = 32.0;             // yarn
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 1.0;  ///< multiplies cos and sin

  bool operator==(const RopeConfig&) const = default;
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
  std::optional<DType> dtype;  ///< torch_dtype or dtype, what the producer computed in; nothing when absent or unusual
  /// Per layer: keys older than this many positions are not seen; 0 means all are.
  std::vector<int64_t> sliding_window;
  std::optional<int64_t> bos_token;
  std::vector<int64_t> eos_tokens;
  std::vector<std::string> warnings;

  int64_t groups() const noexcept { return heads / kv_heads; }
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
