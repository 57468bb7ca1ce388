// Sizes and parameters of a model between the metadata of a GGUF file and config.json.
#pragma once

#include <string>
#include <vector>

#include "core/dtype.h"
#include "gguf/keys.h"
#include "io/gguf.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::gguf {

/// config.json for the model in `file`, whose weights will be stored as `dtype`. Throws unsupported, naming key and
/// reason, for an architecture that no row has and for whatever w4q does not compute; bad_file for
/// metadata that is missing, malformed or contradicts the tensors.
io::Json config_from_gguf(const io::GgufFile& file, const GgufKeys& keys, DType dtype);

/// The metadata that says the same as `config`; "general.*" is the caller's. Adds a sentence to `notes` for what common
/// readers of GGUF ignore. Throws unsupported for what the format cannot say: dynamic rope scaling, windows in some of
/// the layers …
io::GgufMetadata config_to_gguf(const model::ModelConfig& config, std::vector<std::string>& notes);

/// Llama 3's rope scaling travels as a tensor, F32 [head_dim / 2]: what divides each frequency.
inline constexpr std::string_view rope_factors_tensor = "rope_freqs.weight";
/// Its values; empty where `config` needs none.
std::vector<float> rope_factors_to_gguf(const model::ModelConfig& config);

}  // namespace w4q::gguf
