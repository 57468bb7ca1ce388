#include "verify/statistics/delta.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "core/convert.h"
#include "core/text.h"
#include "model/layer_plan.h"
#include "verify/median.h"

namespace w4q::verify {
namespace {

using AllEnergies = std::map<std::string, Energies, std::less<>>;
using model::Role;
using model::VectorRole;

/// Energies of channels in another order, or of another side of a matrix.
struct DeltaReading {
  std::string what;
  std::vector<double> energies;
};

/// One delta net.
class DeltaNet {
 public:
  DeltaNet(const model::OpenedModel& model, const model::Block& block, const AllEnergies& energies)
      : shape_(block.delta) {
    for (const auto& group : block.groups) {
      for (const auto& linear : group.linears) {
        if (linear.role == Role::delta_mixed) mixed_ = linear.name, rows_ = find(energies, linear.name);
        if (linear.role == Role::delta_gate) gate_ = linear.name, gates_ = find(energies, linear.name);
        if (linear.role == Role::output) output_ = linear.name, columns_ = find(energies, linear.name);
      }
    }
    for (const VectorRole role : {VectorRole::decay, VectorRole::step_bias, VectorRole::convolution}) {
      if (const auto* const vector = block.vector(role)) load(model, *vector);
    }
  }

  /// What no training leaves in its vectors.
  void check_vectors(std::vector<std::string>& faults) const {
    for (const auto& [role, vector] : vectors_) {
      const auto& [name, values] = vector;
      if (std::ranges::all_of(values, [](float value) { return value == 0; })) {
        faults.push_back(concat(printable(name), ": is zero throughout: it was never loaded"));
      } else if (role == VectorRole::decay && is_no_logarithm(values)) {
        faults.push_back(
            concat(printable(name), ": is ", median_of(values),
                   " in the median and negative in all heads: it holds what decays by (-exp), not its logarithm"));
      }
    }
  }

  /// Log of the energy of the later half of the taps over that of the earlier one; nothing: none are known.
  std::optional<double> lean_of_taps() const {
    const auto found = vectors_.find(VectorRole::convolution);
    if (found == vectors_.end() || shape_.taps < 2) return std::nullopt;
    const auto& values = found->second.second;
    double early = 0, late = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto tap = static_cast<int64_t>(i) % shape_.taps;
      (2 * tap < shape_.taps ? early : late) += std::pow(double{values[i]}, 2);
    }
    return early > 0 && late > 0 ? std::optional(std::log(late / early)) : std::nullopt;
  }
  const std::string& convolution() const { return vectors_.at(VectorRole::convolution).first; }

  void check_channels(std::vector<std::string>& faults) const {
    if (rows_ == nullptr || std::ssize(rows_->rows) != shape_.channels()) return;
    if (columns_ != nullptr && columns_->k == shape_.values() && std::ssize(columns_->cols) == columns_->k) {
      const auto before = faults.size();
      hold(mixed_, "rows of values", output_, "columns", values_of(rows_->rows), columns_->cols, readings_of_values(),
           faults);
      if (faults.size() == before)
        hold(output_, "columns", mixed_, "rows of values", columns_->cols, values_of(rows_->rows), readings_of_output(),
             faults);
      if (faults.size() > before) return;
    }
    const auto taps = energies_of_taps([](size_t at) { return at; });
    if (!taps.empty()) hold(convolution(), "channels", mixed_, "rows", taps, rows_->rows, readings_of_taps(), faults);
  }

 private:
  static const Energies* find(const AllEnergies& energies, const std::string& name) {
    const auto found = energies.find(name);
    return found == energies.end() ? nullptr : &found->second;
  }

  void load(const model::OpenedModel& model, const model::PlannedVector& vector) {
    const auto& tensors = model.folder.tensors;
    if (!tensors.contains(vector.name)) return;
    const auto tensor = tensors.load(vector.name);
    if (!is_weight_dtype(tensor->dtype) || element_count(tensor->shape) != element_count(vector.shape)) return;
    std::vector<float> values(static_cast<size_t>(element_count(tensor->shape)));
    widen(tensor->bytes, tensor->dtype, values);
    if (!values.empty()) vectors_[vector.role] = {vector.name, std::move(values)};
  }

  static double median_of(std::span<const float> values) {
    return median(std::vector<double>(values.begin(), values.end()));
  }

  /// Heads begin with decays from 0 to 16; −exp of their logarithms is far below what training makes of a logarithm.
  static bool is_no_logarithm(std::span<const float> values) {
    constexpr size_t fewest = 4;
    constexpr double far = -4;
    return values.size() >= fewest && median_of(values) < far &&
           std::ranges::all_of(values, [](float value) { return value < 0; });
  }

  // ---- channels ----

  std::vector<double> values_of(std::span<const double> rows) const {
    return {rows.begin() + 2 * shape_.keys(), rows.end()};
  }

  /// What is called `name` is held against `other`: where the two have nothing in common as stored, and much in another
  /// reading, by as much as relations of attention (energy.cpp).
  static void hold(const std::string& name, std::string_view side, const std::string& other,
                   std::string_view other_side, const std::vector<double>& stored, const std::vector<double>& against,
                   const std::vector<DeltaReading>& readings, std::vector<std::string>& faults) {
    constexpr double within = 0.15, least = 0.3, surely = 7, times = 3;
    const Agreement found = agreement(stored, against);
    if (std::abs(found.value) > within) return;
    const DeltaReading* best = nullptr;
    Agreement better = found;
    for (const DeltaReading& reading : readings) {
      if (reading.energies.size() != against.size()) continue;
      const Agreement here = agreement(reading.energies, against);
      if (here.value > better.value) better = here, best = &reading;
    }
    if (best == nullptr || better.value < std::max(least, times * std::abs(found.value)) ||
        better.sigmas() - found.sigmas() < surely) {
      return;
    }
    faults.push_back(concat(printable(name), ": its ", side, " agree with ", other_side, " of ", printable(other),
                            " by ", fixed(found.value, 2), " as stored, by ", fixed(better.value, 2), " ", best->what));
  }

  /// Rows of values, were those of the matrix in another order.
  std::vector<DeltaReading> readings_of_values() const {
    const auto& rows = rows_->rows;
    const auto values = static_cast<size_t>(shape_.values()), keys = static_cast<size_t>(shape_.keys());
    const auto from = [&](size_t begin) {
      const auto first = rows.begin() + static_cast<std::ptrdiff_t>(begin);
      return std::vector<double>(first, first + static_cast<std::ptrdiff_t>(values));
    };
    std::vector<DeltaReading> readings{{"with values before queries and keys", from(0)},
                                       {"with values between queries and keys", from(keys)}};
    const auto heads = static_cast<size_t>(shape_.key_heads), width = static_cast<size_t>(shape_.key_dim);
    const size_t of_head = values / heads, stride = 2 * width + of_head;
    DeltaReading grouped{"with queries, keys and values of each head together", {}};
    for (size_t head = 0; head < heads; ++head) {
      for (size_t i = 0; i < of_head; ++i) grouped.energies.push_back(rows[head * stride + 2 * width + i]);
    }
    readings.push_back(std::move(grouped));
    const auto own = values_of(rows);
    for (const bool back : {false, true})
      readings.push_back({"with the heads of values in turn over those of keys", in_turn(own, back)});
    for (const int64_t step : {1, -1}) readings.push_back({"with its heads one place on or back", rolled(own, step)});
    return readings;
  }

  /// Columns of the output, were it turned, or had it heads in another order.
  std::vector<DeltaReading> readings_of_output() const {
    std::vector<DeltaReading> readings;
    for (const int64_t step : {1, -1})
      readings.push_back({"with its heads one place on or back", rolled(columns_->cols, step)});
    for (const bool back : {false, true})
      readings.push_back({"with its heads in turn over those of keys", in_turn(columns_->cols, back)});
    if (std::ssize(columns_->rows) == columns_->k) readings.push_back({"transposed", columns_->rows});
    if (gates_ != nullptr && std::ssize(gates_->cols) == columns_->k)
      readings.push_back({concat("with those of ", printable(gate_), " in their place"), gates_->cols});
    return readings;
  }

  /// Energies of channels of the convolution, were its values others: at(i) is where the value i of [channels][taps] stands.
  std::vector<double> energies_of_taps(const std::function<size_t(size_t)>& at) const {
    const auto found = vectors_.find(VectorRole::convolution);
    if (found == vectors_.end()) return {};
    const auto& values = found->second.second;
    const auto taps = static_cast<size_t>(shape_.taps);
    std::vector<double> sums(values.size() / taps);
    for (size_t i = 0; i < values.size(); ++i) sums[i / taps] += std::pow(double{values[at(i)]}, 2);
    for (double& sum : sums) sum = std::log(sum);
    return sums;
  }

  std::vector<DeltaReading> readings_of_taps() const {
    const auto channels = static_cast<size_t>(shape_.channels()), taps = static_cast<size_t>(shape_.taps);
    const auto own = energies_of_taps([](size_t at) { return at; });
    std::vector<DeltaReading> readings{
        {"as [taps, channels]", energies_of_taps([=](size_t i) { return i % taps * channels + i / taps; })}};
    for (const int64_t step : {1, -1}) readings.push_back({"with its channels one head on or back", rolled(own, step)});
    DeltaReading values_first{"with values before queries and keys", {}};
    for (size_t i = 0; i < channels; ++i)
      values_first.energies.push_back(own[(i + static_cast<size_t>(shape_.values())) % channels]);
    readings.push_back(std::move(values_first));
    return readings;
  }

  std::vector<double> rolled(const std::vector<double>& series, int64_t heads) const {
    const auto size = std::ssize(series);
    std::vector<double> result;
    for (int64_t i = 0; i < size; ++i)
      result.push_back(series[static_cast<size_t>((i + heads * shape_.value_dim + size) % size)]);
    return result;
  }

  /// Heads of values that share a key's stand side by side; in turn they stand so many heads of keys apart.
  std::vector<double> in_turn(const std::vector<double>& series, bool back) const {
    const int64_t shared = shape_.value_heads / shape_.key_heads;
    std::vector<double> result(series.size());
    for (int64_t head = 0; head < shape_.value_heads; ++head) {
      const int64_t other = head % shared * shape_.key_heads + head / shared;
      const int64_t from = back ? head : other, to = back ? other : head;
      for (int64_t i = 0; i < shape_.value_dim; ++i) {
        result[static_cast<size_t>(to * shape_.value_dim + i)] =
            series[static_cast<size_t>(from * shape_.value_dim + i)];
      }
    }
    return result;
  }

  kernels::DeltaShape shape_;
  std::string mixed_, gate_, output_;
  const Energies *rows_ = nullptr, *gates_ = nullptr, *columns_ = nullptr;
  std::map<VectorRole, std::pair<std::string, std::vector<float>>> vectors_;  ///< name and values
};

/// The last tap is the position itself. What leans to the past in one layer, and to the present in all others, was turned.
void check_taps(const std::vector<DeltaNet>& nets, std::vector<std::string>& faults) {
  constexpr double twice = 0.69;
  constexpr size_t fewest_others = 2;
  for (size_t i = 0; i < nets.size() && nets.size() > fewest_others; ++i) {
    size_t present = 0;
    for (size_t j = 0; j < nets.size(); ++j) present += j != i && nets[j].lean_of_taps().value_or(0) > twice;
    const double lean = nets[i].lean_of_taps().value_or(0);
    if (lean > -twice || present + 1 != nets.size()) continue;
    faults.push_back(
        concat(printable(nets[i].convolution()), ": its earlier taps are ", fixed(std::exp(-lean / 2), 1),
               " times as large as its later ones, in all other layers it is the other way round: taps are "
               "in reverse order"));
  }
}

}  // namespace

std::vector<std::string> delta_faults(const model::OpenedModel& model, const AllEnergies& energies) {
  std::vector<std::string> faults;
  if (model.config.architecture == nullptr || model.config.delta_layers.empty()) return faults;
  std::vector<DeltaNet> nets;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    for (const auto& block : model::layer_plan(model.config, layer).blocks) {
      if (block.kind == model::BlockKind::delta_net) nets.emplace_back(model, block, energies);
    }
  }
  for (const DeltaNet& net : nets) net.check_vectors(faults), net.check_channels(faults);
  check_taps(nets, faults);
  return faults;
}

}  // namespace w4q::verify
