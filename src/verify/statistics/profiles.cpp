#include "verify/statistics/profiles.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/median.h"
#include "verify/statistics/orders.h"

namespace w4q::verify {
namespace {

using AllEnergies = std::map<std::string, Energies, std::less<>>;

constexpr size_t least_layers = 4, least_channels = 128;
/// Standard errors: of what is not related, of what is beyond any doubt, and of all others where one is not.
constexpr double unrelated = 2.5, surely = 7, present = 10;
/// … of a side and the same in another order.
constexpr double most_in_common = 0.2;
/// Other orders of the channels that tell what chance does.
constexpr size_t trials = 64;

/// Channels that can be compared with each other.
enum class Space { stream, values, gated };

struct Side {
  std::string linear, side;
  model::Role role{};
  int64_t layer = 0;
  Space space{};
  bool whole = true;
  std::vector<float> ranks;  ///< mean 0, sum of squares 1
};

double dot(std::span<const float> a, std::span<const float> b) {
  // In four sums, which a processor adds side by side.
  double sums[4] = {0, 0, 0, 0};
  size_t i = 0;
  for (; i + 4 <= a.size(); i += 4) {
    for (size_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * double{b[i + j]};
  }
  for (; i < a.size(); ++i) sums[0] += double{a[i]} * double{b[i]};
  return sums[0] + sums[1] + sums[2] + sums[3];
}

class ProfileCheck {
 public:
  ProfileCheck(const LayerGroups& groups, const AllEnergies& energies, const NormSizes& norms)
      : groups_(groups), layers_(std::ssize(groups)), energies_(energies), norms_(norms) {
    for (int64_t layer = 0; layer < layers_; ++layer) add_layer(layer);
    for (size_t i = 0; i < sides_.size(); ++i) kinds_[kind_of(sides_[i])].push_back(i);
  }

  ProfileReport run() {
    report_.places.resize(sides_.size());
    mixtures_.resize(sides_.size());
    chance_.resize(sides_.size());
    measure_dots();
    parallel_for(static_cast<int64_t>(sides_.size()), 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) measure(i);
    });
    for (size_t i = 0; i < sides_.size(); ++i) judge(i);
    report_lacking();
    std::erase_if(report_.places, [](const Place& place) { return place.linear.empty(); });
    return std::move(report_);
  }

 private:
  static std::string kind_of(const Side& side) { return concat(static_cast<int>(side.role), side.side); }

  // ---- sides ----

  void add(const model::PlannedLinear& linear, int64_t layer, const char* side, Space space, std::vector<double> values,
           bool whole) {
    add(linear.name, linear.role, layer, side, space, std::move(values), whole);
  }

  void add(const std::string& name, model::Role role, int64_t layer, const char* side, Space space,
           std::vector<double> values, bool whole) {
    if (values.size() < least_channels || !std::ranges::all_of(values, [](double x) { return std::isfinite(x); }))
      return;
    const auto ranks = ranks_beside_neighbours(std::move(values));
    Side made{name, side, role, layer, space, whole, std::vector<float>(ranks.size())};
    const double middle = static_cast<double>(ranks.size() - 1) / 2;
    double squares = 0;
    for (const double rank : ranks) squares += (rank - middle) * (rank - middle);
    if (!(squares > 0)) return;
    for (size_t i = 0; i < ranks.size(); ++i)
      made.ranks[i] = static_cast<float>((ranks[i] - middle) / std::sqrt(squares));
    sides_.push_back(std::move(made));
  }

  /// Sums of energies of `channels`, which `of` maps to `count` others.
  template <class Of>
  static std::vector<double> gathered(std::span<const double> energies, int64_t count, const Of& of) {
    std::vector<double> sums(static_cast<size_t>(count));
    for (size_t i = 0; i < energies.size(); ++i) {
      sums[static_cast<size_t>(of(static_cast<int64_t>(i)))] += std::exp(energies[i]);
    }
    for (double& sum : sums) sum = std::log(sum);
    return sums;
  }

  void add_layer(int64_t layer) {
    for (const auto& group : groups_[static_cast<size_t>(layer)]) {
      const auto norm = group.norm && !group.linears.empty() ? norms_.find(group.norm->name) : norms_.end();
      if (norm != norms_.end() && !group.expert) {
        add(norm->first, group.linears.front().role, layer, "channels", Space::stream, norm->second, true);
      }
      for (const auto& linear : group.linears) {
        const auto found = energies_.find(linear.name);
        if (found == energies_.end() || group.expert) continue;
        const Energies& energies = found->second;
        const bool whole = energies.rows.size() == static_cast<size_t>(energies.n);
        switch (linear.role) {
          case model::Role::query:
          case model::Role::key:
          default:
            break;  // what their rows say depends on the rotary embedding
          case model::Role::value:
            add(linear, layer, "rows", Space::values, energies.rows, whole);
            break;
          case model::Role::gate:
          case model::Role::up:
            add(linear, layer, "rows", Space::gated, energies.rows, whole);
            break;
          case model::Role::output:
          case model::Role::down:
            add(linear, layer, "rows", Space::stream, energies.rows, whole);
            break;
        }
        add_columns(linear, layer, group, energies);
      }
    }
  }

  void add_columns(const model::PlannedLinear& linear, int64_t layer, const model::InputGroup& group,
                   const Energies& energies) {
    if (group.inputs == model::Basis::stream) add(linear, layer, "columns", Space::stream, energies.cols, true);
    if (group.producer.empty()) return;
    const auto producer = energies_.find(group.producer);
    if (producer == energies_.end()) return;
    const Energies& from = producer->second;
    const auto sums = gathered(energies.cols, from.n, [&](int64_t col) { return group.producer_channel(col); });
    std::vector<double> taken;
    for (const int64_t row : from.rows_taken) taken.push_back(sums[static_cast<size_t>(row)]);
    const bool whole = energies.k == from.n && taken.size() == sums.size();
    add(linear, layer, "columns", linear.role == model::Role::down ? Space::gated : Space::values, std::move(taken),
        whole);
  }

  // ---- what the other layers have in common ----

  /// The side of a kind in a layer.
  const Side* at(const std::string& kind, int64_t layer) const {
    const auto found = kinds_.find(kind);
    if (found == kinds_.end()) return nullptr;
    for (const size_t i : found->second) {
      if (sides_[i].layer == layer) return &sides_[i];
    }
    return nullptr;
  }

  static bool comparable(const Side* a, const Side* b) {
    return a != nullptr && b != nullptr && a->linear != b->linear && a->space == b->space &&
           a->ranks.size() == b->ranks.size();
  }

  /// How the sides of two kinds agree, `step` layers on: by layer, NaN where they cannot be compared.
  using Dots = std::map<std::tuple<std::string, std::string, int64_t>, std::vector<double>>;

  void measure_dots() {
    std::vector<std::vector<double>*> all;
    std::vector<Dots::key_type> keys;
    for (const auto& [kind, members] : kinds_) {
      for (const auto& [other, others] : kinds_) {
        for (const int64_t step : {-1, 0, 1}) {
          keys.emplace_back(kind, other, step);
          all.push_back(&dots_[keys.back()]);
        }
      }
    }
    parallel_for(static_cast<int64_t>(keys.size()), 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const auto& [kind, other, step] = keys[i];
        for (int64_t layer = 0; layer < layers_; ++layer) {
          const Side *a = at(kind, layer), *b = at(other, layer + step);
          all[i]->push_back(comparable(a, b) ? dot(a->ranks, b->ranks) : NAN);
        }
      }
    });
  }

  /// How sides of `kind` agree with those of `other`, `step` layers on, in all layers but `without`.
  double usual(const std::string& kind, const std::string& other, int64_t step, int64_t without) const {
    std::vector<double> values;
    const auto& dots = dots_.find({kind, other, step})->second;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const double value = dots[static_cast<size_t>(layer)];
      if (layer != without && layer + step != without && !std::isnan(value)) values.push_back(value);
    }
    return values.size() + 1 >= least_layers ? median(std::move(values)) : 0;
  }

  /// The sides around one, each as much as the same two agree in other layers: what its own ranks are held against.
  std::vector<float> mixture_of(const Side& side, std::string_view without = {}) const {
    std::vector<double> sum(side.ranks.size());
    const std::string kind = kind_of(side);
    const double chance = 2 / std::sqrt(static_cast<double>(side.ranks.size()));
    for (const auto& [other, members] : kinds_) {
      for (const int64_t step : {-1, 0, 1}) {
        const Side* const partner = at(other, side.layer + step);
        if (!comparable(&side, partner) || partner->linear == without) continue;
        const double weight = usual(kind, other, step, side.layer);
        if (std::abs(weight) < chance) continue;
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * static_cast<double>(partner->ranks[i]);
      }
    }
    return {sum.begin(), sum.end()};
  }

  double sigmas(size_t i, std::span<const float> ranks) const {
    return chance_[i] > 0 ? dot(ranks, mixtures_[i]) / chance_[i] : 0;
  }

  void measure(size_t i) {
    const Side& side = sides_[i];
    if (kinds_.at(kind_of(side)).size() < least_layers) return;
    mixtures_[i] = mixture_of(side);
    double squares = 0;
    const size_t size = side.ranks.size();
    std::vector<float> moved(size);
    for (size_t trial = 1; trial <= trials; ++trial) {
      const size_t by = trial * size / (trials + 1);
      for (size_t c = 0; c < size; ++c) moved[c] = side.ranks[(c + by) % size];
      const double found = dot(moved, mixtures_[i]);
      squares += found * found;
    }
    // Never less than of independent channels.
    const double independent = dot(mixtures_[i], mixtures_[i]) / static_cast<double>(size);
    chance_[i] = std::sqrt(std::max(squares / trials, independent));
    report_.places[i] = {side.linear, side.side, side.layer, sigmas(i, side.ranks), 0};
  }

  // ---- verdicts ----

  void judge(size_t i) {
    Place& place = report_.places[i];
    if (place.linear.empty()) return;
    place.others = INFINITY;
    for (const size_t j : kinds_.at(kind_of(sides_[i]))) {
      if (j != i) place.others = std::min(place.others, report_.places[j].sigmas);
    }
    // What is related the other way round is one that scales were folded into.
    if (std::abs(place.sigmas) > unrelated) return;
    if (const auto other = other_reading(i)) {
      auto& list = other->elsewhere ? report_.warnings : report_.faults;
      list.emplace(place.linear,
                   concat("its ", place.side, " are related to the weights around it as those of other layers ",
                          "are by ", fixed(place.sigmas, 1), " standard errors as stored, by ", other->what));
      return;
    }
    if (place.others < present) return;
    lacking_[place.linear].push_back(concat("its ", place.side, " are related to the weights around it by ",
                                            fixed(place.sigmas, 1), " standard errors, in every other layer by ",
                                            fixed(place.others, 0), " or more"));
  }

  void report_lacking() {
    for (const auto& [linear, reasons] : lacking_) {
      // Scales that were folded into one layer alone leave no more than that.
      if (!report_.faults.contains(linear)) report_.warnings.emplace(linear, join(reasons, "; "));
    }
  }

  struct Reading {
    std::string what;
    bool elsewhere = false;  ///< of another weight: what was folded into one of the two layers alone looks the same
  };

  std::optional<Reading> other_reading(size_t i) const {
    const Side& side = sides_[i];
    double best = surely;
    std::optional<Reading> found;
    std::vector<float> moved(side.ranks.size());
    for (const ChannelOrder& order : channel_orders()) {
      if (!side.whole || side.ranks.size() % order.multiple != 0) continue;
      for (size_t c = 0; c < moved.size(); ++c) moved[c] = side.ranks[order.from(c, moved.size())];
      // Where channels are as those that stand there are, an order says nothing.
      if (std::abs(dot(moved, side.ranks)) > most_in_common) continue;
      const double here = sigmas(i, moved);
      if (here <= best) continue;
      best = here;
      found = Reading{concat(fixed(here, 1), " ", order.name)};
    }
    for (size_t j = 0; j < sides_.size() && !found; ++j) {
      const Side& other = sides_[j];
      if (other.linear == side.linear || other.space != side.space || other.side != side.side ||
          other.ranks.size() != side.ranks.size() || report_.places[j].linear.empty()) {
        continue;
      }
      if (other.layer != side.layer && other.role != side.role) continue;
      // Both must be better off in each other's place.
      if (report_.places[j].sigmas > unrelated) continue;
      // What they have in common says nothing of which is which.
      const double here = dot(other.ranks, mixture_of(side, other.linear)) / chance_[i];
      const double there = dot(side.ranks, mixture_of(other, side.linear)) / chance_[j];
      if (here > surely && there > surely) {
        found = Reading{concat(fixed(here, 1), " with those of ", printable(other.linear), " in their place"), true};
      }
    }
    return found;
  }

  const LayerGroups& groups_;
  const int64_t layers_;
  const AllEnergies& energies_;
  const NormSizes& norms_;
  std::vector<Side> sides_;
  std::map<std::string, std::vector<size_t>> kinds_;
  Dots dots_;
  std::vector<std::vector<float>> mixtures_;
  std::vector<double> chance_;
  std::map<std::string, std::vector<std::string>> lacking_;
  ProfileReport report_;
};

}  // namespace

NormSizes norm_sizes(const model::OpenedModel& model, const LayerGroups& groups) {
  NormSizes sizes;
  for (const auto& layer : groups) {
    for (const auto& group : layer) {
      const std::string name = group.norm ? group.norm->name + ".weight" : std::string{};
      if (!group.norm || sizes.contains(group.norm->name) || !model.folder.tensors.contains(name)) continue;
      const auto tensor = model.folder.tensors.load(name);
      if (!is_weight_dtype(tensor->dtype)) continue;
      std::vector<float> values(static_cast<size_t>(element_count(tensor->shape)));
      widen(tensor->bytes, tensor->dtype, values);
      auto& logs = sizes[group.norm->name];
      for (const float value : values) logs.push_back(std::log(std::abs(double{value} + double{group.norm->offset})));
    }
  }
  return sizes;
}

ProfileReport check_profiles(const LayerGroups& groups, const AllEnergies& energies, const NormSizes& norms) {
  return ProfileCheck(groups, energies, norms).run();
}

}  // namespace w4q::verify
