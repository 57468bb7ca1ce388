// The rotary embedding part of a GGUF file's metadata.
#pragma once

#include <string_view>
#include <vector>

#include "gguf/keys.h"
#include "io/gguf.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::gguf {

/// "rope_scaling" of config.json: null where nothing is scaled. `factors` are the values of rope_freqs.weight, empty
/// when the file has none. Of yarn, a key `multiplier` whose value is 1 takes back its magnitude; elsewhere there must be
/// none. Throws unsupported for scaling that w4q does not compute, bad_file for contradictions.
io::Json rope_scaling_from_gguf(const GgufKeys& keys, const std::vector<float>& factors, double theta, int64_t head_dim,
                                std::string_view multiplier = {});

/// Appends the keys of `rope`, which begin with `architecture`. Throws unsupported for what they cannot say.
void rope_scaling_to_gguf(const model::RopeConfig& rope, const std::string& architecture, io::GgufMetadata& metadata);

/// What yarn multiplies cosines and sines by where nothing else is said: attention_factor.
double usual_magnitude(double factor);

/// What divides each frequency under Llama 3's scaling.
std::vector<float> llama3_factors(const model::RopeConfig& rope, int64_t head_dim);

}  // namespace w4q::gguf
