// Experts of a mixture that stand in one tensor: [experts, n, k] or, inputs first, [experts, k, n]. Each is a linear by
// itself, "….experts.down_proj.3", and is packed as one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "io/checkpoint.h"

namespace w4q::model {

struct StackedExperts {
  std::string name;  ///< of the tensor: "model.layers.0.mlp.experts.down_proj"
  int64_t experts = 0;
  int64_t n = 0, k = 0;       ///< outputs and inputs of one expert
  bool inputs_first = false;  ///< stored as [experts, k, n]

  /// The tensor that one expert is once they are taken apart: "model.layers.0.mlp.experts.down_proj.3.weight".
  std::string expert(int64_t index) const;
};

/// The stacks of a folder, by what config.json says of hidden_size and the number of experts: gates and ups read what
/// downs write. Those whose shapes do not tell inputs from outputs are not among them.
std::vector<StackedExperts> stacked_experts(const checkpoint::Folder& folder);

/// `tensors` with the experts of `stacks` beside the stacks, cut out as they are loaded.
io::Checkpoint take_apart(io::Checkpoint tensors, const std::vector<StackedExperts>& stacks);

}  // namespace w4q::model
