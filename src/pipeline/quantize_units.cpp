#include "pipeline/quantize_units.h"

#include <charconv>
#include <set>
#include <string_view>

#include "model/model.h"

namespace w4q::pipeline {
namespace {

/// Whose tensor it is; nothing for one of no layer.
std::optional<int64_t> layer_of(const model::ModelConfig& config, std::string_view tensor) {
  const std::string prefix = config.names.prefix + "layers.";
  if (!tensor.starts_with(prefix)) return std::nullopt;
  int64_t layer = -1;
  const char* const end = tensor.data() + tensor.size();
  const auto found = std::from_chars(tensor.data() + prefix.size(), end, layer);
  const bool whole = found.ec == std::errc() && found.ptr != end && *found.ptr == '.';
  return whole && layer >= 0 && layer < config.layers ? std::optional(layer) : std::nullopt;
}

}  // namespace

std::vector<PlanUnit> units_of(const Plan& plan, const model::ModelConfig& config, bool calibrated) {
  std::vector<PlanUnit> units;
  std::set<int64_t> begun;
  for (const auto& tensor : plan.tensors) {
    auto layer = calibrated ? layer_of(config, tensor.name) : std::nullopt;
    const bool goes_on = layer && !units.empty() && units.back().layer == layer;
    // What a layer has and does not read is carried along behind all layers.
    if (layer && !goes_on && !begun.insert(*layer).second) layer.reset();
    if (!goes_on) units.push_back({layer, {}});
    units.back().tensors.push_back(&tensor);
  }
  return units;
}

checkpoint::PackedLinearInfo packed_info(const TensorPlan& tensor, const ScaledModules& scaled) {
  return tensor.packed_info(scaled.contains(model::module_path(tensor.name)));
}

std::vector<io::PlannedTensor> planned_of(const TensorPlan& tensor, const ScaledModules& scaled) {
  if (!tensor.scheme) return {{tensor.name, tensor.dtype, tensor.shape}};
  return checkpoint::planned_planes(packed_info(tensor, scaled));
}

std::vector<WorkUnit> work_of(const std::vector<PlanUnit>& units, const ScaledModules& scaled) {
  std::vector<WorkUnit> work;
  for (const auto& unit : units) {
    work.push_back({.name = unit.tensors.front()->name, .tensors = {}, .cost = 0, .in_turn = unit.layer.has_value()});
    for (const TensorPlan* tensor : unit.tensors) {
      for (auto& planned : planned_of(*tensor, scaled)) work.back().tensors.push_back(std::move(planned.name));
      work.back().cost += tensor->bytes_before;
    }
  }
  return work;
}

}  // namespace w4q::pipeline
