#include "pipeline/shared_factor.h"

#include <algorithm>
#include <cmath>

#include "checkpoint/fused.h"
#include "core/convert.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/small_float.h"
#include "model/layer_plan.h"
#include "model/parameters.h"
#include "quantize/source_matrix.h"

namespace w4q::pipeline {
namespace {

float largest_weight(const TensorView& weight) {
  float largest = 0;
  std::vector<float> row(static_cast<size_t>(weight.shape[1]));
  for (int64_t r = 0; r < weight.shape[0]; ++r) {
    widen(quantize::row_bytes(weight, r), weight.dtype, row);
    largest = std::max(largest, formats::table_max(row));
  }
  return std::isfinite(largest) ? largest : 0;  // the quantizer says which is not
}

}  // namespace

bool has_tensor_factor(const formats::Scheme& scheme) noexcept {
  return scheme.family == formats::SchemeFamily::small_float && scheme.scale == formats::ScaleType::e4m3;
}

SharedFactors::SharedFactors(const model::OpenedModel& model, const SchemeOf& scheme_of) : model_(model) {
  if (model.config.architecture == nullptr) {
    group_by_names(scheme_of);
    return;
  }
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    for (const auto& inputs : model::input_groups(model.config, layer)) {
      auto group = std::make_shared<Group>();
      for (const auto& name : inputs.names()) {
        const auto scheme = scheme_of(name);
        if (scheme && has_tensor_factor(*scheme)) group->names.push_back(name);
      }
      if (group->names.size() < 2) continue;
      for (const auto& name : group->names) groups_.emplace(name, group);
    }
  }
}

void SharedFactors::group_by_names(const SchemeOf& scheme_of) {
  std::map<std::string, std::shared_ptr<Group>> fused;  // by what servers call them as one
  for (const auto& parameter : model::parameters(model_)) {
    const std::string module(model::module_path(parameter.name));
    const auto* const row = checkpoint::fused_row(checkpoint::last_part(module));
    if (!parameter.linear || row == nullptr) continue;
    const auto scheme = scheme_of(module);
    if (!scheme || !has_tensor_factor(*scheme)) continue;
    auto& group = fused[concat(checkpoint::parent(module), ".", row->name)];
    if (!group) group = std::make_shared<Group>();
    group->names.push_back(module);
  }
  for (const auto& [name, group] : fused) {
    if (group->names.size() < 2) continue;
    for (const auto& module : group->names) groups_.emplace(module, group);
  }
}

float SharedFactors::of(std::string_view module) {
  const auto found = groups_.find(module);
  if (found == groups_.end()) return 0;
  Group& group = *found->second;
  const std::lock_guard lock(group.mutex);
  if (group.factor != 0) return group.factor;
  float largest = 0;
  for (const auto& name : group.names) {
    largest = std::max(largest, largest_weight(model_.folder.tensors.load(name + ".weight").view()));
  }
  return group.factor = formats::small_float_factor(largest);
}

}  // namespace w4q::pipeline
