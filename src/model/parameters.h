// What a model is made of, tensor by tensor: as its architecture says or, where that is not known, as names and shapes of
// the tensors tell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/opened.h"

namespace w4q::model {

/// One parameter: what a complete checkpoint must hold.
struct Parameter {
  std::string name;  ///< "model.layers.0.mlp.up_proj.weight"
  Shape shape;
  bool linear = false;       ///< a matrix that a scheme may pack: linear layers, and the embedding table
  std::string gguf;          ///< "blk.0.ffn_up.weight"; empty: GGUF has no such tensor
  bool rotary_rows = false;  ///< PlannedLinear::rotary_rows
  std::string left = {};     ///< why it is left as it is unless it is asked for by name: "router"; empty: it is packed
  int64_t gguf_part = -1;    ///< PlannedLinear::gguf_part
  float gguf_offset = 0;     ///< GGUF has the values with this added
};

/// "model.layers.0.mlp.up_proj.weight" → "model.layers.0.mlp.up_proj"; a name without the suffix stays.
std::string_view module_path(std::string_view tensor_name) noexcept;

/// Reasons that an option answers: --lm-head, --embeddings.
inline constexpr std::string_view left_head = "head", left_embeddings = "embeddings";

/// The numbers in a module's path, the first two: of the layer and of the expert in it; −1 where it has none.
struct LayerNumbers {
  int64_t layer = -1, expert = -1;
  auto operator<=>(const LayerNumbers&) const = default;
};
LayerNumbers layer_numbers(std::string_view module) noexcept;

/// Whether a module is the head, or an embedding table: "lm_head", "model.language_model.embed_tokens".
bool is_head(std::string_view module) noexcept;
bool is_embedding(std::string_view module) noexcept;

/// Every parameter of the architecture in model order. A tied head is not listed. Throws unsupported where the
/// architecture is not known.
std::vector<Parameter> parameters(const ModelConfig& config);

/// The same of a folder; where its architecture is not known, what the folder holds, packed linears as the matrices that
/// they are, in the order of names. Linears are matrices of BF16, F16 or F32 by the name "….weight".
std::vector<Parameter> parameters(const OpenedModel& model);

/// What reason_to_carry() says of most.
inline constexpr std::string_view of_tower = "part of a tower for other inputs than text",
                                  further_tokens = "predicts further tokens",
                                  never_read = "never read: another layer's stand in its place";

/// Why a tensor that is no parameter of a known architecture is carried along as it is, and no fault: it belongs to what
/// sees, hears or predicts further tokens, or is never read. Empty: nothing is known of it.
std::string_view reason_to_carry(const ModelConfig& config, std::string_view tensor);

/// Why a matrix of an architecture that is not known is left as it is, by its module path: because it stands outside the
/// numbered layers of the text model, or is known to be ruined by few bits. Empty: it is a linear like any other.
/// `layers`: num_hidden_layers where config.json says so, else 0; what comes behind them predicts further tokens.
std::string_view reason_to_leave(std::string_view module, int64_t layers);

}  // namespace w4q::model
