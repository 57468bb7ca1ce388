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
  if (candidate.config.architecture == nullptr) return;
  for (int64_t layer = 0; layer < candidate.config.layers; ++layer) {
    for (const auto& group : model::input_groups(candidate.config, layer)) {
      if (group.norm) read_norms_.insert(group.norm->name + ".weight");
    }
  }
}

RequantizedTensors::Finding RequantizedTensors::look_at(const std::string& name) {
  const auto ours = candidate_.folder.tensors.load(name), theirs = base_.folder.tensors.load(name);
  const float offset = norm_offset(candidate_.config, name);
  if (hold_same_values(ours.view(), theirs.view(), offset)) return {.same = true};
  const bool may_be_folded = candidate_.folder.small_floats && candidate_.config.architecture != nullptr;
  if (may_be_folded && read_norms_.contains(name)) {
    const auto problem = factors_fault(ours.view(), theirs.view(), offset);
    return {.fault = problem.empty() ? problem : concat("is not the base's: ", problem)};
  }
  const bool matrix = ours->shape.size() == 2;
  std::string fault = fault_of(noise_of(ours.view(), theirs.view()), matrix);
  if (!may_be_folded) return {.fault = std::move(fault)};
  if (!fault.empty() && is_folded_bias(name)) return {};
  const std::string module(model::module_path(name));
  const auto place = model::find_linear(candidate_.config, module);
  const bool other_norm = matrix && place && reads_other_norm(*place);
  if (!matrix || !place || (fault.empty() && !other_norm)) return {.fault = std::move(fault)};
  const bool plain = fault.empty();
  fault = fault_of(noise_of_folded(module), matrix);
  if (plain && !fault.empty()) {
    return {.fault = concat("is the base's, but ", printable(place->group.norm->name),
                            ".weight before it is not: it does not carry the factors that this one gave away")};
  }
  return {.fault = std::move(fault)};
}

std::vector<std::string> RequantizedTensors::faults_of_norms() const {
  return candidate_.folder.small_floats ? norms_not_carried(candidate_, base_) : std::vector<std::string>{};
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

bool RequantizedTensors::is_folded_bias(const std::string& name) {
  constexpr std::string_view end = ".bias";
  if (!name.ends_with(end)) return false;
  const std::string module = name.substr(0, name.size() - end.size());
  if (!model::find_linear(candidate_.config, module) || !gives_rows(candidate_.config, module)) return false;
  const auto rows = weights_.units(module).rows;
  const auto ours = all_values(candidate_.folder, name), theirs = all_values(base_.folder, name);
  if (rows.size() != ours.size()) return false;
  double noise = 0, signal = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    const double wanted = double{theirs[row]} * double{rows[row]};
    noise += std::pow(double{ours[row]} - wanted, 2), signal += wanted * wanted;
  }
  return noise <= most_of_floats * signal;
}

bool RequantizedTensors::reads_other_norm(const model::LinearPlace& place) const {
  return place.group.norm && !holds_base_values(candidate_, base_, place.group.norm->name + ".weight");
}

}  // namespace w4q::verify
