#include "pipeline/linear_groups.h"

namespace w4q::pipeline {

formats::Rotation run_time_rotation(const quantize::QuantizeOptions& options, const model::InputGroup& group) {
  const quantize::Step* rotate = options.steps.find(quantize::StepKind::rotate);
  const bool folded = rotate != nullptr && rotate->folded && group.inputs != model::Basis::own;
  return folded ? formats::Rotation{} : options.rotation();
}

}  // namespace w4q::pipeline
