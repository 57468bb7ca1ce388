// The rotary embedding part of a GGUF file's metadata.
#pragma once

#include <vector>

#include "gguf/keys.h"
#include "io/gguf.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::gguf {

/// "rope_scaling" of config.json: null where nothing is scaled. `factors` are the values of rope_freqs.weight, empty
/// when the file has none. Throws unsupported for scaling that w4q does not compute, bad_file for contradictions.
io::Json rope_scaling_from_gguf(const GgufKeys& keys, const std::vector<float>& factors, double theta,
                                int64_t head_dim);

/// Appends the keys of `rope`, which begin with `architecture`. Throws unsupported for what they cannot say.
void rope_scaling_to_gguf(const model::RopeConfig& rope, const std::string& architecture, io::GgufMetadata& metadata);

/// What divides each frequency under Llama 3's scaling.
std::vector<float> llama3_factors(const model::RopeConfig& rope, int64_t head_dim);

}  // namespace w4q::gguf
