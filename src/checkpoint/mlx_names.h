// What mlx-lm calls a model's tensors, and what the model itself does.
#pragma once

#include <cstdint>
#include <string>

#include "io/json.h"

namespace w4q::checkpoint {

/// Of the stacks "X.switch_mlp.gate_proj" and "X.experts.gate_proj" expert 3 is "X.experts.3.gate_proj", "w1" for gates of the
/// former in a block_sparse_moe; of other stacks "X.3".
std::string mlx_expert(const std::string& module, int64_t expert);

/// mlx-lm puts the text model of all that see below "language_model.model.", with the head in "language_model.lm_head". Of those
/// that transformers stores otherwise, by `config`, the name that it has there: "model.language_model.layers.0.…", or
/// "model.layers.0.…" of a text model by itself; all others stay.
std::string name_behind_mlx(const io::Json& config, const std::string& name);

}  // namespace w4q::checkpoint
