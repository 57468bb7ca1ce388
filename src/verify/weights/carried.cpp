#include "verify/weights/carried.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/interrupt.h"
#include "core/text.h"
#include "model/layer_plan.h"
#include "verify/weights/base_values.h"
#include "verify/weights/factors.h"
#include "verify/weights/norm_factors.h"
#include "verify/weights/rescaled.h"

namespace w4q::verify {
namespace {

/// A channel of a norm beside one column that reads it, in logarithms: what the norm gave and what the column carries.
struct NormPair {
  double given = 0, carried = 0, weight = 0;
};

/// Beyond so many standard errors. A column is known no better than a norm is stored, to 2^-8.
constexpr double sure_errors = 4, norm_error = 0x1p-8;
/// A norm none of whose channels moved by more was not folded, and its readers cannot tell.
constexpr double hardly_moved = 0.05;
constexpr size_t fewest_channels = 16;

/// Of one reader, both less their means: rounding may shrink a weight as a whole.
std::vector<NormPair> norm_pairs(const std::vector<NormFactor>& given, const std::vector<Factor>& carried) {
  std::vector<NormPair> pairs;
  double all = 0, mean_given = 0, mean_carried = 0;
  for (size_t c = 0; c < given.size(); ++c) {
    if (!given[c].known || !given[c].possible || !(carried[c].squares > 0) || carried[c].of_one_size()) continue;
    const double value = carried[c].value(), error = carried[c].error();
    if (!(value > sure_errors * error)) continue;
    const double weight = 1 / (std::pow(error / value, 2) + norm_error * norm_error);
    pairs.push_back({std::log(double{given[c].factor}), std::log(value), weight});
    all += weight, mean_given += weight * pairs.back().given, mean_carried += weight * pairs.back().carried;
  }
  for (NormPair& pair : pairs) pair.given -= mean_given / all, pair.carried -= mean_carried / all;
  return pairs;
}

/// carried = slope · given: 1 where the readers carry what the norm gave, 0 where they know nothing of it.
struct CarriedSlope {
  double value = 1, error = 0;
};

CarriedSlope carried_slope(const std::vector<NormPair>& pairs) {
  double squares = 0, products = 0, rest = 0;
  for (const NormPair& pair : pairs)
    squares += pair.weight * pair.given * pair.given, products += pair.weight * pair.given * pair.carried;
  CarriedSlope slope{products / squares, 0};
  for (const NormPair& pair : pairs) rest += pair.weight * std::pow(pair.carried - slope.value * pair.given, 2);
  slope.error = std::sqrt(std::max(1.0, rest / static_cast<double>(pairs.size())) / squares);
  return slope;
}

class CarriedNorms {
 public:
  CarriedNorms(const model::OpenedModel& candidate, const model::OpenedModel& base)
      : candidate_(candidate), base_(base) {}

  std::vector<std::string> run() {
    if (candidate_.config.architecture == nullptr) return {};
    for (int64_t layer = 0; layer < candidate_.config.layers; ++layer) {
      for (const auto& group : model::input_groups(candidate_.config, layer)) {
        check_interrupt();
        if (group.norm && seen_.insert(group.norm->name).second) look_at(group);
      }
    }
    return std::move(faults_);
  }

 private:
  void look_at(const model::InputGroup& group) {
    const std::string name = group.norm->name + ".weight";
    const auto &ours = candidate_.folder.tensors, &theirs = base_.folder.tensors;
    if (candidate_.folder.tuned.contains(name) || !ours.contains(name) || !theirs.contains(name)) return;
    if (holds_base_values(candidate_, base_, *group.norm)) return;
    const auto is = ours.load(name), was = theirs.load(name);
    if (is->shape != was->shape) return;
    const auto given = norm_factors(is.view(), was.view(), group.norm->offset);
    std::vector<NormPair> pairs;
    for (const std::string& reader : norm_readers(candidate_.config, group)) {
      if (gives_rows(candidate_.config, reader)) continue;
      const auto base = stored_weight(base_.folder, reader), stored = stored_weight(candidate_.folder, reader);
      if (base.n != stored.n || base.k != stored.k || base.k != std::ssize(given)) continue;
      const auto of_reader = norm_pairs(given, column_factors(base, stored));
      pairs.insert(pairs.end(), of_reader.begin(), of_reader.end());
    }
    judge(name, pairs);
  }

  void judge(const std::string& norm, const std::vector<NormPair>& pairs) {
    const auto moved = [](const NormPair& pair) { return std::abs(pair.given) > hardly_moved; };
    if (pairs.size() < fewest_channels || !std::ranges::any_of(pairs, moved)) return;
    const CarriedSlope slope = carried_slope(pairs);
    if (slope.value + sure_errors * slope.error < 0.5) {
      faults_.push_back(
          concat(printable(norm),
                 ": is not the base's, and the columns that read it do not carry what it gave: they follow by ",
                 fixed(slope.value, 2), ", 1 expected; take the norm that belongs to these weights"));
    }
  }

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  std::set<std::string> seen_;
  std::vector<std::string> faults_;
};

}  // namespace

std::vector<std::string> norms_not_carried(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  return CarriedNorms(candidate, base).run();
}

}  // namespace w4q::verify
