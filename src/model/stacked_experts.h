// Experts of a mixture that stand in one tensor: [experts, n, k] or, inputs first, [experts, k, n]. Each is a linear by
// itself, "….experts.down_proj.3", and is packed as one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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

/// A linear as it is called where experts stand one by one, and which rows of an expert of a stack it is.
struct ExpertPart {
  std::string name;
  int64_t first_row = 0, rows = 0;
};
/// "….experts.gate_up_proj.3" of so many rows is "….experts.3.gate_proj" and "….experts.3.up_proj", one half after the
/// other; whatever is no expert of a stack is itself.
std::vector<ExpertPart> expert_parts(std::string_view module, int64_t rows);
/// Whether config.json is of an architecture whose stacks have gates and ups one half after the other.
bool stacks_halves(const io::Json& config);

/// `tensors` with the experts of `stacks` beside the stacks, cut out as they are loaded.
io::Checkpoint take_apart(io::Checkpoint tensors, const std::vector<StackedExperts>& stacks);

}  // namespace w4q::model
