#include "pipeline/linear_groups.h"

namespace w4q::pipeline {

formats::Rotation run_time_rotation(const quantize::QuantizeOptions& options, const model::InputGroup& group) {
  const bool folded = options.folded && group.inputs != model::Basis::own;
  return folded ? formats::Rotation{} : options.rotation;
}

}  // namespace w4q::pipeline
