// The rotary embedding part of config.json.
#pragma once

#include "model/config.h"
#include "model/config_reader.h"

namespace w4q::model {

/// Reads rope_theta with rope_scaling (older style) or rope_parameters (newer style); `config.head_dim` and
/// `config.max_positions` are set already. Adds warnings to `config`. Throws unsupported for a type that w4q does not
/// compute or parameters that differ between layer types, bad_file for anything malformed.
RopeConfig parse_rope(const ConfigReader& reader, double default_theta, ModelConfig& config);

}  // namespace w4q::model
