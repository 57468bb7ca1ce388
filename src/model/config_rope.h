// The rotary embedding part of config.json.
#pragma once

#include "model/config.h"
#include "model/config_reader.h"

namespace w4q::model {

/// Of which layers, where parameters are nested by the types of layers, and how wide their heads are.
struct RopeQuery {
  std::string_view layer_type = {};  ///< empty: of all
  int64_t head_dim = 0;
  double theta = 0;                           ///< where none is stated
  std::string_view theta_key = "rope_theta";  ///< of the file's top, where the parameters have none; empty: not read
  std::optional<double> part = {};  ///< of a head that turns, where none is stated; nothing: the architecture's own
};

/// rope_scaling or rope_parameters as they stand, or the architecture's own where there is neither; else an empty object.
/// Throws bad_file unless it is an object.
io::Json rope_parameters(const ConfigReader& reader, const ArchitectureRow& row);

/// Reads rope_theta with rope_scaling (older style) or rope_parameters (newer style); `config.max_positions` is set
/// already. Adds warnings to `config`. Throws unsupported for a type that w4q does not compute or parameters that differ
/// between layer types where all are asked for, bad_file for anything malformed.
RopeConfig parse_rope(const ConfigReader& reader, const RopeQuery& query, ModelConfig& config);

}  // namespace w4q::model
