// Norms and kept tensors against the others of the model: what no training leaves.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/opened.h"

namespace w4q::verify {

/// One line each: norms that are zero, negative or ones as no other of the model is, that have a run of zeros, or sizes
/// that no norm has; and tables whose values are of such sizes.
std::vector<std::string> norm_faults(const model::OpenedModel& model);

/// "model.layers.3.mlp.gate.weight" → "model.layers.mlp.gate.weight": the same in every layer and expert.
std::string role_of(std::string_view name);

}  // namespace w4q::verify
