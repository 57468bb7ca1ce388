// Dialects whose files have the tensors of several linears in one, the experts of a mixture: what part of which tensor a
// linear's is, and a checkpoint in which each linear has tensors of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

/// Where the tensor of one linear stands in the files.
struct StackedPart {
  std::string whole;  ///< "….experts.down_proj_blocks" for "….experts.down_proj.3.blocks"
  int64_t index = 0;
};
/// Nothing where `row` has no stacks, or the name is none of an expert's.
std::optional<StackedPart> stacked_part(const DialectRow& row, std::string_view tensor);

/// `tensors` with each linear's own in the place of the stacks: cut out when they are loaded.
io::Checkpoint take_apart(io::Checkpoint tensors, const QuantizationConfig& quantization);

/// The tensors of the files for those of linears, in the order in which they begin. Throws unsupported naming a linear
/// that is no expert, and one that a stack lacks.
std::vector<io::PlannedTensor> stacked_tensors(const DialectRow& row, std::vector<io::PlannedTensor> parts);

}  // namespace w4q::checkpoint
