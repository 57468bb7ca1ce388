#include "verify/statistics/stacks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/text.h"
#include "model/parameters.h"

namespace w4q::verify {
namespace {

using EnergyMap = std::map<std::string, Energies, std::less<>>;
using Series = std::vector<double>;

/// Of what writes and what reads, as in energy.cpp.
constexpr double sound_agreement = 0.3, no_agreement = 0.15, times_as_much = 3, beyond_doubt = 7;
/// Mixtures in which both agree, before one alone is looked into.
constexpr int64_t fewest_sound = 4;

/// An expert's energies of rows of ups, and of the columns of downs that read these.
struct ExpertSeries {
  Series ups, columns;
};

struct StoredMixture {
  std::string path;      ///< "model.layers.3.mlp.experts"
  std::string up, down;  ///< of the first expert
  std::map<int64_t, ExpertSeries> experts;

  Series ups() const {
    Series all;
    for (const auto& [number, expert] : experts) all.insert(all.end(), expert.ups.begin(), expert.ups.end());
    return all;
  }
  Series columns() const {
    Series all;
    for (const auto& [number, expert] : experts) all.insert(all.end(), expert.columns.begin(), expert.columns.end());
    return all;
  }
};

/// Whether a row of gates and ups in one matrix [n, k] is of ups.
constexpr bool is_of_ups(int64_t row, int64_t n, bool in_turn) { return in_turn ? row % 2 == 1 : row >= n / 2; }

/// Of gates and ups in one matrix the rows of ups among those that were decoded, and the columns behind them; of ups alone
/// all.
ExpertSeries series_of(const Energies& writer, const Energies& reader, bool both, bool in_turn) {
  ExpertSeries series;
  const int64_t half = writer.n / 2;
  for (size_t i = 0; i < writer.rows.size(); ++i) {
    const int64_t row = writer.rows_taken[i];
    if (both && !is_of_ups(row, writer.n, in_turn)) continue;
    series.ups.push_back(writer.rows[i]);
    series.columns.push_back(reader.cols[static_cast<size_t>(!both ? row : in_turn ? row / 2 : row - half)]);
  }
  return series;
}

const model::PlannedLinear* with_role(const model::InputGroup& group, std::initializer_list<model::Role> roles) {
  const auto fits = [&](const model::PlannedLinear& linear) {
    return std::ranges::find(roles, linear.role) != roles.end();
  };
  const auto found = std::ranges::find_if(group.linears, fits);
  return found == group.linears.end() ? nullptr : &*found;
}

/// The mixtures of a layer whose experts were decoded, by the paths of their experts.
std::vector<StoredMixture> mixtures_of(const std::vector<model::InputGroup>& groups, const EnergyMap& energies,
                                       bool in_turn) {
  std::map<std::pair<std::string, int64_t>, std::pair<const model::PlannedLinear*, const model::PlannedLinear*>> found;
  for (const auto& group : groups) {
    if (!group.expert || group.linears.empty()) continue;
    const std::string& name = group.linears.front().name;
    const size_t at = name.find(".experts.");
    if (at == std::string::npos) continue;
    auto& [up, down] = found[{name.substr(0, at + 8), *group.expert}];
    if (const auto* const linear = with_role(group, {model::Role::up, model::Role::gate_up})) up = linear;
    if (const auto* const linear = with_role(group, {model::Role::down})) down = linear;
  }
  std::vector<StoredMixture> mixtures;
  for (const auto& [place, pair] : found) {
    const auto& [up, down] = pair;
    if (up == nullptr || down == nullptr) continue;
    const auto writer = energies.find(up->name), reader = energies.find(down->name);
    const bool both = up->role == model::Role::gate_up;
    if (writer == energies.end() || reader == energies.end()) continue;
    if (writer->second.n != (both ? 2 : 1) * reader->second.k) continue;
    if (mixtures.empty() || mixtures.back().path != place.first)
      mixtures.push_back({place.first, up->name, down->name, {}});
    mixtures.back().experts[place.second] = series_of(writer->second, reader->second, both, in_turn);
  }
  return mixtures;
}

bool is_sound(const Agreement& found) { return found.value >= sound_agreement && found.sigmas() >= beyond_doubt; }
bool is_better(const Agreement& other, const Agreement& found) {
  return is_sound(other) && other.value > times_as_much * std::abs(found.value) &&
         other.sigmas() - std::abs(found.sigmas()) > beyond_doubt;
}

std::string by_how_much(const Agreement& found, const Agreement& other) {
  return concat("by ", fixed(found.value, 2), " as stored, by ", fixed(other.value, 2), " (", fixed(other.sigmas(), 0),
                " standard errors)");
}

/// A linear's name for all experts: "….experts.3.down_proj" → "….experts.*.down_proj"; of a stack the stack.
std::string stacked_name(const StoredMixture& mixture, const std::string& linear) {
  const std::string rest = linear.substr(mixture.path.size() + 1);
  const size_t dot = rest.find('.');
  const bool numbered = !rest.empty() && rest.front() >= '0' && rest.front() <= '9';
  return numbered ? concat(mixture.path, ".*", rest.substr(dot)) : concat(mixture.path, ".", rest.substr(0, dot));
}

// ---- orders of experts ----

struct ExpertOrder {
  std::string_view name;
  size_t (*from)(size_t i, size_t count);
};
constexpr std::array<ExpertOrder, 4> expert_orders{
    {{"with experts in reverse order", [](size_t i, size_t count) { return count - 1 - i; }},
     {"with experts one place on", [](size_t i, size_t count) { return (i + 1) % count; }},
     {"with experts one place back", [](size_t i, size_t count) { return (i + count - 1) % count; }},
     {"with the halves of the experts exchanged", [](size_t i, size_t count) { return (i + count / 2) % count; }}}};

std::string order_fault(const StoredMixture& mixture, const Agreement& stored) {
  const Series ups = mixture.ups();
  std::vector<const ExpertSeries*> experts;
  for (const auto& [number, expert] : mixture.experts) experts.push_back(&expert);
  std::string fault;
  Agreement best = stored;
  for (const auto& order : expert_orders) {
    Series columns;
    for (size_t i = 0; i < experts.size(); ++i) {
      const Series& from = experts[order.from(i, experts.size())]->columns;
      columns.insert(columns.end(), from.begin(), from.end());
    }
    const Agreement other = agreement(ups, columns);
    if (!is_better(other, stored) || other.value <= best.value) continue;
    best = other;
    fault = concat(": its columns agree with the rows of ", printable(stacked_name(mixture, mixture.up)), " ",
                   by_how_much(stored, other), " ", order.name);
  }
  return fault;
}

/// Experts whose downs are each other's, whichever they are; of single ones chance must be excluded one by one.
std::string exchange_fault(const StoredMixture& mixture) {
  constexpr size_t most_compared = size_t{1} << 15;
  std::vector<int64_t> weak;
  for (const auto& [number, expert] : mixture.experts) {
    if (std::abs(agreement(expert.ups, expert.columns).value) < no_agreement) weak.push_back(number);
  }
  if (weak.size() < 2 || weak.size() * weak.size() > most_compared) return {};
  std::map<int64_t, int64_t> reader_of;
  std::set<int64_t> taken;
  for (const int64_t number : weak) {
    Agreement best;
    for (const int64_t other : weak) {
      const Agreement here = agreement(mixture.experts.at(number).ups, mixture.experts.at(other).columns);
      if (is_sound(here) && here.value > best.value) best = here, reader_of[number] = other;
    }
    if (best.value > 0 && !taken.insert(reader_of[number]).second) return {};  // two of one: they were copied
  }
  std::vector<std::string> pairs;
  for (const auto& [number, other] : reader_of) {
    if (reader_of.contains(other)) pairs.push_back(concat("expert ", number, " by that of ", other));
  }
  if (pairs.size() < 2) return {};
  constexpr size_t named = 4;
  const size_t more = pairs.size() - std::min(pairs.size(), named);
  if (more > 0) pairs.resize(named);
  return concat(": what ", printable(stacked_name(mixture, mixture.up)), " writes agrees in another order: of ",
                join(pairs, ", of "), more > 0 ? concat(" and ", more, " more") : "");
}

// ---- bytes of stacks ----

/// Axes of a stack in memory, outermost first: experts, outputs, inputs.
using Axes = std::array<int, 3>;

/// Energies of a stack read in another order of axes: of the outputs, or of the inputs, of each expert that is taken.
Series energies_read_as(const std::vector<float>& values, const std::array<size_t, 3>& sizes, const Axes& axes,
                        int axis, const std::vector<size_t>& experts) {
  std::array<size_t, 3> stride{};
  size_t step = 1;
  for (int at = 2; at >= 0; --at)
    stride[static_cast<size_t>(axes[static_cast<size_t>(at)])] = step,
    step *= sizes[static_cast<size_t>(axes[static_cast<size_t>(at)])];
  const auto kept = static_cast<size_t>(axis), summed = static_cast<size_t>(3 - axis);
  Series result;
  for (const size_t expert : experts) {
    for (size_t i = 0; i < sizes[kept]; ++i) {
      double sum = 0;
      for (size_t j = 0; j < sizes[summed]; ++j) {
        const double value = values[expert * stride[0] + i * stride[kept] + j * stride[summed]];
        sum += value * value;
      }
      result.push_back(std::log(sum));
    }
  }
  return result;
}

/// Of the rows of gates and ups, those of ups.
Series ups_among(const Series& rows, int64_t n, bool in_turn) {
  Series ups;
  for (size_t at = 0; at < rows.size(); ++at) {
    if (is_of_ups(static_cast<int64_t>(at) % n, n, in_turn)) ups.push_back(rows[at]);
  }
  return ups;
}

class StackBytes {
 public:
  StackBytes(const model::OpenedModel& model, bool in_turn) : model_(model), in_turn_(in_turn) {}

  /// "…" and what is wrong with it, of the two stacks of a mixture that do not agree; nothing where neither is a stack in 16
  /// bit.
  std::optional<std::pair<std::string, std::string>> look_at(const StoredMixture& mixture,
                                                             const Agreement& stored) const {
    const auto *up = stack_of(mixture.up), *down = stack_of(mixture.down);
    if (up == nullptr || down == nullptr || up->n != 2 * down->k) return std::nullopt;
    const auto experts = taken(up->experts);
    const auto ups = values_of(*up), downs = values_of(*down);
    const auto rows = [&](const Axes& axes) {
      return ups_among(energies_read_as(ups, sizes_of(*up), axes, 1, experts), up->n, in_turn_);
    };
    const auto columns = [&](const Axes& axes) { return energies_read_as(downs, sizes_of(*down), axes, 2, experts); };
    const Series as_rows = rows(axes_of(*up)), as_columns = columns(axes_of(*down));
    Agreement best = stored;
    std::optional<std::pair<std::string, std::string>> found;
    for (const Axes& axes : all_axes) {
      const auto consider = [&](const model::StackedExperts& stack, const Agreement& other, std::string_view sides) {
        if (axes == axes_of(stack) || !is_better(other, stored) || other.value <= best.value) return;
        best = other;
        found = {stack.name, concat(": energies of its ", sides, " ", by_how_much(stored, other), " with bytes of [",
                                    text_of(axes), "], not of [", text_of(axes_of(stack)), "], which its shape says")};
      };
      consider(*up, agreement(rows(axes), as_columns), "rows agree with the columns of the other stack");
      consider(*down, agreement(as_rows, columns(axes)), "columns agree with the rows of the other stack");
    }
    return found;
  }

 private:
  static constexpr std::array<Axes, 6> all_axes{{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}};

  static Axes axes_of(const model::StackedExperts& stack) { return stack.inputs_first ? Axes{0, 2, 1} : Axes{0, 1, 2}; }
  static std::array<size_t, 3> sizes_of(const model::StackedExperts& stack) {
    return {static_cast<size_t>(stack.experts), static_cast<size_t>(stack.n), static_cast<size_t>(stack.k)};
  }
  static std::string text_of(const Axes& axes) {
    constexpr std::array<const char*, 3> words{"experts", "outputs", "inputs"};
    return concat(words[static_cast<size_t>(axes[0])], ", ", words[static_cast<size_t>(axes[1])], ", ",
                  words[static_cast<size_t>(axes[2])]);
  }

  const model::StackedExperts* stack_of(const std::string& linear) const {
    const std::string name = linear.substr(0, linear.rfind('.'));
    for (const auto& stack : model_.apart) {
      if (model::module_path(stack.name) == name && model_.folder.tensors.contains(stack.name)) return &stack;
    }
    return nullptr;
  }

  std::vector<float> values_of(const model::StackedExperts& stack) const {
    const auto loaded = model_.folder.tensors.load(stack.name);
    std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
    widen(loaded->bytes, loaded->dtype, values);
    return values;
  }

  static std::vector<size_t> taken(int64_t experts) {
    constexpr int64_t most = 16;
    std::vector<size_t> result;
    for (int64_t i = 0; i < std::min(experts, most); ++i)
      result.push_back(static_cast<size_t>(i * experts / std::min(experts, most)));
    return result;
  }

  const model::OpenedModel& model_;
  bool in_turn_;
};

}  // namespace

bool gates_take_turns(const LayerGroups& groups, const EnergyMap& energies) {
  double halves = 0, turns = 0;  // sums of agreements, which chance leaves near nothing
  for (const auto& layer : groups) {
    for (const bool turn : {false, true}) {
      for (const auto& mixture : mixtures_of(layer, energies, turn))
        (turn ? turns : halves) += agreement(mixture.ups(), mixture.columns()).value;
    }
  }
  return turns > halves + sound_agreement;
}

std::map<std::string, std::string> misplaced_experts(const model::OpenedModel& model, const LayerGroups& groups,
                                                     const RowOrders& orders, const EnergyMap& energies) {
  std::vector<StoredMixture> mixtures;
  for (const auto& layer : groups) {
    for (auto& mixture : mixtures_of(layer, energies, orders.in_turn)) {
      if (mixture.experts.size() >= 2) mixtures.push_back(std::move(mixture));
    }
  }
  const auto judged = parallel_results(mixtures, [&](const StoredMixture& mixture) {
    const Agreement stored = agreement(mixture.ups(), mixture.columns());
    std::string fault = std::abs(stored.value) < no_agreement ? order_fault(mixture, stored) : std::string();
    if (fault.empty()) fault = exchange_fault(mixture);
    return std::pair(stored, std::move(fault));
  });
  std::map<std::string, std::string> faults;
  std::vector<std::pair<StoredMixture, Agreement>> unrelated;
  int64_t sound = 0;
  for (size_t i = 0; i < mixtures.size(); ++i) {
    const auto& [stored, fault] = judged[i];
    sound += is_sound(stored);
    if (!fault.empty()) {
      faults.emplace(stacked_name(mixtures[i], mixtures[i].down), fault);
    } else if (std::abs(stored.value) < no_agreement) {
      unrelated.emplace_back(std::move(mixtures[i]), stored);
    }
  }
  // Models whose mixtures are all unrelated are not looked into byte by byte: nothing would come of it.
  if (sound < fewest_sound || 2 * std::ssize(unrelated) > sound) return faults;
  const StackBytes bytes(model, orders.in_turn);
  for (const auto& [mixture, stored] : unrelated) {
    if (auto fault = bytes.look_at(mixture, stored)) faults.insert(std::move(*fault));
  }
  return faults;
}

}  // namespace w4q::verify
