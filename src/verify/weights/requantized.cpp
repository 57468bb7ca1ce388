#include "verify/weights/requantized.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"
#include "model/parameters.h"
#include "model/weight_error.h"
#include "verify/weights/base_values.h"
#include "verify/weights/carried.h"
#include "verify/weights/norm_factors.h"

namespace w4q::verify {
namespace {

/// Rounding to 4 bits leaves some 1 % of a row's energy, to 2 bits 12 %.
constexpr double most_of_another = 0.5;
/// Noise over signal: of E2M1 0.01 to 0.015, with scales of powers of two and heavy tails up to 0.03.
constexpr double most_of_floats = 0.1;

std::vector<float> all_values(const checkpoint::Folder& folder, const std::string& name) {
  const auto tensor = folder.tensors.load(name);
  return values_of(tensor.view(), 0, element_count(tensor->shape));
}

}  // namespace

RequantizedTensors::RequantizedTensors(const model::OpenedModel& candidate, const model::OpenedModel& base)
    : candidate_(candidate), base_(base), weights_(candidate, base) {
  if (!may_be_folded()) return;
  for (const auto& norm : model::all_norms(candidate.config)) offsets_[norm.name + ".weight"] = norm.offset;
  for (int64_t layer = 0; layer < candidate.config.layers; ++layer) {
    for (const auto& group : model::input_groups(candidate.config, layer)) look_around(layer, group);
  }
}

void RequantizedTensors::look_around(int64_t layer, const model::InputGroup& group) {
  for (const auto& linear : group.linears) {
    if (!both_hold(linear.name + ".weight")) broken_.insert(layer);
  }
  if (!group.norm) return;
  const std::string norm = group.norm->name + ".weight";
  if (!both_hold(norm)) {
    broken_.insert(layer);
  } else if (!holds_base_values(candidate_, base_, *group.norm)) {
    other_norms_.insert(norm);
  }
}

RequantizedTensors::Finding RequantizedTensors::look_at(const std::string& name) {
  const auto ours = candidate_.folder.tensors.load(name), theirs = base_.folder.tensors.load(name);
  const auto known = offsets_.find(name);
  const float offset = known != offsets_.end() ? known->second : 0;
  if (hold_same_values(ours.view(), theirs.view(), offset)) return {.same = true};
  if (other_norms_.contains(name)) {
    const auto problem = factors_fault(ours.view(), theirs.view(), offset);
    return {.fault = problem.empty() ? problem : concat("is not the base's: ", problem)};
  }
  const bool matrix = ours->shape.size() == 2;
  std::string fault = fault_of(noise_of(ours.view(), theirs.view()), matrix);
  if (!may_be_folded()) return {.fault = std::move(fault)};
  return {.fault = matrix ? fault_behind_folds(name, std::move(fault)) : fault_of_bias(name, std::move(fault))};
}

std::string RequantizedTensors::fault_behind_folds(const std::string& name, std::string fault) {
  const std::string module(model::module_path(name));
  const auto place = model::find_linear(candidate_.config, module);
  if (!place || broken_.contains(place->layer)) return fault;
  const bool other_norm = place->group.norm && other_norms_.contains(place->group.norm->name + ".weight");
  if (fault.empty() && !other_norm) return fault;
  std::string behind = fault_of(noise_of_folded(module), true);
  if (!fault.empty() || behind.empty()) return behind;
  return concat("is the base's, but ", printable(place->group.norm->name),
                ".weight before it is not: it does not carry the factors that this one gave away");
}

std::vector<std::string> RequantizedTensors::faults_of_norms() const {
  return other_norms_.empty() || !broken_.empty() ? std::vector<std::string>{} : norms_not_carried(candidate_, base_);
}

bool RequantizedTensors::may_be_folded() const noexcept {
  return candidate_.folder.small_floats && candidate_.config.architecture != nullptr;
}

bool RequantizedTensors::both_hold(const std::string& name) const {
  const auto &ours = candidate_.folder.tensors, &theirs = base_.folder.tensors;
  if (!ours.contains(name) || !theirs.contains(name)) return false;
  const io::TensorInfo &is = ours.at(name), &was = theirs.at(name);
  return is.shape == was.shape && is_weight_dtype(is.dtype) && is_weight_dtype(was.dtype);
}

void RequantizedTensors::Noise::add_row(int64_t row, double row_signal, double row_noise) noexcept {
  signal += row_signal, noise += row_noise;
  if (row_signal > 0 && row_noise / row_signal > worst) worst = row_noise / row_signal, worst_row = row;
}

RequantizedTensors::Noise RequantizedTensors::noise_of(const TensorView& ours, const TensorView& theirs) {
  const int64_t width = ours.shape.empty() ? 1 : std::max<int64_t>(ours.shape.back(), 1);
  Noise result;
  for (int64_t row = 0; row < element_count(ours.shape) / width; ++row) {
    const auto a = values_of(ours, row * width, (row + 1) * width),
               b = values_of(theirs, row * width, (row + 1) * width);
    double noise = 0, signal = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      noise += std::pow(double{a[i]} - double{b[i]}, 2), signal += double{b[i]} * double{b[i]};
    }
    result.add_row(row, signal, noise);
  }
  return result;
}

RequantizedTensors::Noise RequantizedTensors::noise_of_folded(const std::string& module) {
  std::vector<model::WeightError> rows;
  model::compare_weights(stored_weight(base_.folder, module), weights_.effective(module), &rows);
  Noise result;
  for (size_t row = 0; row < rows.size(); ++row) {
    result.add_row(static_cast<int64_t>(row), rows[row].signal, rows[row].noise);
  }
  return result;
}

std::string RequantizedTensors::fault_of(const Noise& noise, bool matrix) const {
  const auto& folder = candidate_.folder;
  const bool rows = folder.small_floats && matrix;
  if (noise.noise > most_of_another * noise.signal) return "is not the base's: half of its energy is another's";
  if (rows && noise.worst > most_of_another) {
    return concat("is not the base's: half of the energy of row ", noise.worst_row, " is another's");
  }
  if (!rows || folder.few_bits || noise.noise <= most_of_floats * noise.signal) return {};
  return concat("is not the base's: ", fixed(100 * noise.noise / noise.signal, 1),
                " % of its energy is another's, of small floats at most ", fixed(100 * most_of_floats, 0),
                " % expected");
}

std::string RequantizedTensors::fault_of_bias(const std::string& name, std::string fault) {
  constexpr std::string_view end = ".bias";
  if (fault.empty() || !name.ends_with(end)) return fault;
  const std::string module = name.substr(0, name.size() - end.size());
  const auto place = model::find_linear(candidate_.config, module);
  if (!place || broken_.contains(place->layer) || !gives_rows(candidate_.config, module)) return fault;
  const auto rows = weights_.units(module).rows;
  const auto ours = all_values(candidate_.folder, name), theirs = all_values(base_.folder, name);
  if (rows.size() != ours.size()) return fault;
  double noise = 0, signal = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    const double wanted = double{theirs[row]} * double{rows[row]};
    noise += std::pow(double{ours[row]} - wanted, 2), signal += wanted * wanted;
  }
  return noise <= most_of_floats * signal ? std::string() : fault;
}

}  // namespace w4q::verify
