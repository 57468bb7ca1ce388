// The work of a quantization in parts that ranks share: a tensor each, or a calibrated layer.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"
#include "pipeline/plan.h"
#include "pipeline/shared_output.h"

namespace w4q::pipeline {

/// Tensors of the plan that are quantized together: those of a calibrated layer, or one.
struct PlanUnit {
  std::optional<int64_t> layer;
  std::vector<const TensorPlan*> tensors;
};
std::vector<PlanUnit> units_of(const Plan& plan, const model::ModelConfig& config, bool calibrated);

/// Modules whose input scale is stored.
using ScaledModules = std::set<std::string, std::less<>>;
/// What becomes of one tensor of the input.
std::vector<io::PlannedTensor> planned_of(const TensorPlan& tensor, const ScaledModules& scaled);
checkpoint::PackedLinearInfo packed_info(const TensorPlan& tensor, const ScaledModules& scaled);

std::vector<WorkUnit> work_of(const std::vector<PlanUnit>& units, const ScaledModules& scaled);

}  // namespace w4q::pipeline
