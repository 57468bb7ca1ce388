#include "verify/statistics/unlearnt.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/text.h"
#include "model/parameters.h"

namespace w4q::verify {
namespace {

/// Of independent values rows and columns differ in size by chance alone; of trained ones by far more.
constexpr double by_chance = 1.5, least_by_chance = 0.3, by_training = 6;
constexpr size_t fewest_series = 64, fewest_of_role = 4, fewest_of_all = 6;

/// The variance of logarithms of sums of so many squares over that of independent normal values: 1 where nothing was learnt.
double dispersion(std::span<const double> logarithms, size_t terms) {
  double sum = 0, squares = 0, count = 0;
  for (const double value : logarithms) {
    if (std::isfinite(value)) sum += value, squares += value * value, count += 1;
  }
  if (count < fewest_series) return NAN;
  return std::max(0.0, squares / count - sum / count * (sum / count)) * static_cast<double>(terms) / 2;
}

struct Measured {
  double rows = NAN, cols = NAN;
  double size = 0;  ///< logarithm of the mean square
  bool is_known() const { return std::isfinite(rows) && std::isfinite(cols); }
  bool is_random() const {
    return is_known() && std::max(rows, cols) < by_chance && std::min(rows, cols) > least_by_chance;
  }
  bool is_learnt() const { return is_known() && std::max(rows, cols) > by_training; }
};

Measured measure(const Energies& energies) {
  return {dispersion(energies.rows, energies.cols.size()), dispersion(energies.cols, energies.rows.size()),
          energies.mean};
}

std::string fault_of(const std::string& name, const Measured& found) {
  return concat(
      printable(name), ": its rows and columns are as large as those of random values (they differ by ",
      fixed(found.rows, 1), " and ", fixed(found.cols, 1),
      " times as much as chance makes them, in trained matrices by far more): it was initialised, not loaded");
}

/// Whether half of what one linear writes and another reads is related beyond chance: of made up weights it is not.
bool is_trained(const EnergyReport& relations) {
  constexpr double beyond_chance = 4;
  constexpr int64_t fewest_relations = 6;
  int64_t related = 0, all = 0;
  for (const Relation& relation : relations.relations) {
    if (relation.by != Relation::Kind::channels) continue;
    ++all, related += relation.found.sigmas() > beyond_chance;
  }
  return all >= fewest_relations && 2 * related >= all;
}

}  // namespace

std::vector<std::string> unlearnt_faults(const model::OpenedModel& model, const LayerGroups& groups,
                                         const EnergyReport& relations,
                                         const std::map<std::string, Energies, std::less<>>& energies) {
  std::vector<std::string> faults;
  if (!is_trained(relations)) return faults;
  std::map<model::Role, std::vector<std::pair<std::string, Measured>>> roles;
  size_t learnt = 0, others = 0;
  for (const auto& layer : groups) {
    for (const auto& group : layer) {
      for (const auto& linear : group.linears) {
        const auto found = energies.find(linear.name);
        if (found == energies.end() || group.expert || linear.role == model::Role::router) continue;
        const Measured measured = measure(found->second);
        if (!measured.is_known()) continue;
        roles[linear.role].emplace_back(linear.name, measured);
        ++(measured.is_learnt() ? learnt : others);
      }
    }
  }
  for (const auto& [role, members] : roles) {
    const auto random = std::ranges::count_if(members, [](const auto& one) { return one.second.is_random(); });
    const auto sound = std::ranges::count_if(members, [](const auto& one) { return one.second.is_learnt(); });
    if (random != 1 || static_cast<size_t>(sound) < fewest_of_role || sound + 1 != std::ssize(members)) continue;
    // What was added to a model and hardly trained is small.
    const auto as_large = [&](const Measured& one) {
      return std::ranges::any_of(members, [&](const auto& other) {
        return other.second.is_learnt() && other.second.size < one.size + std::log(10.0);
      });
    };
    for (const auto& [name, measured] : members) {
      if (measured.is_random() && as_large(measured)) faults.push_back(fault_of(name, measured));
    }
  }
  if (learnt < fewest_of_all || others > learnt) return faults;
  for (const auto& [name, info] : model.folder.tensors.tensors()) {
    const std::string module(model::module_path(name));
    const bool table =
        model::layer_numbers(module).layer < 0 && (model::is_embedding(module) || model::is_head(module));
    if (!table || info.shape.size() != 2 || !name.ends_with(".weight") || !is_weight_dtype(info.dtype)) continue;
    const Measured found = measure(energies_of(info.shape[0], info.shape[1], model.folder.tensors.rows(name)));
    if (found.is_random()) faults.push_back(fault_of(name, found));
  }
  return faults;
}

}  // namespace w4q::verify
