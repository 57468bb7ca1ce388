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

/// Some scaling of rotary embeddings travels as tensors, F32 [pairs]: what divides each frequency. Llama 3's, and which
/// pairs of Gemma 4's turn; Phi-3's within the positions of training and beyond.
inline constexpr std::string_view rope_factors_tensor = "rope_freqs.weight";
inline constexpr std::string_view rope_short_tensor = "rope_factors_short.weight";
inline constexpr std::string_view rope_long_tensor = "rope_factors_long.weight";
struct RopeFactors {
  std::string_view tensor;
  std::vector<float> values;
};
/// Those that `config` needs.
std::vector<RopeFactors> rope_factors_to_gguf(const model::ModelConfig& config);
/// Whether a tensor is one of them.
bool is_rope_factors(std::string_view tensor) noexcept;
/// The values of one; nothing where the file has none. Throws bad_file for another type or shape.
std::vector<float> read_rope_factors(const io::GgufFile& file, const GgufKeys& keys, std::string_view tensor,
                                     int64_t pairs);

}  // namespace w4q::gguf
