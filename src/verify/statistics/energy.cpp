#include "verify/statistics/energy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <set>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/statistics/orders.h"

namespace w4q::verify {
namespace {

using AllEnergies = std::map<std::string, Energies, std::less<>>;

constexpr int64_t block_rows = 16;
/// Of an expert, and of all experts together.
constexpr EnergySample of_expert{.all_up_to = int64_t{1} << 19, .taken = int64_t{1} << 19};
constexpr int64_t of_all_experts = int64_t{1} << 31;

/// Beyond chance: orders, linears and layers make thousands of pairs.
constexpr double surely = 7;
/// Nothing is said against what agrees so.
constexpr double least_agreement = 0.3;
/// By how much another reading must agree better.
constexpr double times_better = 3;
/// A relation that no other layer lacks, in standard errors: here below the one, everywhere else above the other.
constexpr double absent = 3, present = 8;
/// What stands in another's place has nothing in common with it; copies of one layer have, whatever was folded into them.
constexpr double most_in_common = 0.2;
/// Of rows that turn together. Factors that are folded into queries and keys take their relation away, and leave another
/// way of pairing more of it than theirs, up to some 0.35.
constexpr double least_of_turns = 0.5;

std::vector<double> reordered(std::span<const double> series, const ChannelOrder& order) {
  std::vector<double> result(series.size());
  for (size_t i = 0; i < series.size(); ++i) result[i] = series[order.from(i, series.size())];
  return result;
}

/// How gates and ups stand in one matrix: which channel an up's row is of, of `half` ones; −1: it is a gate's.
struct StackReading {
  std::string_view name;
  int64_t (*channel)(int64_t row, int64_t half);
};
constexpr int64_t channel_of_halves(int64_t row, int64_t half) { return row < half ? -1 : row - half; }
constexpr int64_t channel_in_turn(int64_t row, int64_t half) { return row % 2 == 0 || row >= 2 * half ? -1 : row / 2; }
constexpr std::array<StackReading, 4> stack_readings{
    {{"with gates and ups one half after the other", channel_of_halves},
     {"with gates and ups in turn", channel_in_turn},
     // Converters that take one for the other sort what was sorted.
     {"with gates and ups one half after the other, of which even and odd rows were sorted apart",
      [](int64_t row, int64_t half) { return channel_of_halves(row < half ? 2 * row : 2 * (row - half) + 1, half); }},
     {"with gates and ups in turn, whose halves were put in turn once more",
      [](int64_t row, int64_t half) { return channel_in_turn(row % 2 == 0 ? row / 2 : half + row / 2, half); }}}};

/// What two linears have in common, as two series of one length.
struct Pair {
  Relation relation;
  std::vector<double> a, b;
  bool whole = true;  ///< no channel was left out: they can be read in other orders
  std::string axis_a, axis_b;
  int64_t expert = -1;
  const model::InputGroup* group = nullptr;  ///< of channels: what reads them
};

class EnergyCheck {
 public:
  EnergyCheck(const LayerGroups& groups, const RowOrders& orders, const AllEnergies& energies)
      : groups_(groups), orders_(orders), energies_(energies) {}

  EnergyReport run() {
    for (size_t layer = 0; layer < groups_.size(); ++layer) look_at_layer(static_cast<int64_t>(layer));
    measure_kinds();
    for (const Pair& pair : pairs_) look_at(pair);
    report_hits();
    look_for_absent();
    for (Pair& pair : pairs_) report_.relations.push_back(std::move(pair.relation));
    return std::move(report_);
  }

 private:
  const Energies* find(const std::string& linear) const {
    const auto found = energies_.find(linear);
    return found == energies_.end() ? nullptr : &found->second;
  }

  static std::string short_name(const std::string& linear) { return linear.substr(linear.rfind('.') + 1); }

  void add(int64_t layer, const std::string& a, const std::string& axis_a, const std::string& b,
           const std::string& axis_b, Relation::Kind by, std::vector<double> x, std::vector<double> y, bool whole) {
    const std::string kind = concat(short_name(a), " ", axis_a, ", ", short_name(b), " ", axis_b);
    Pair pair{{layer, concat(expert_ >= 0 ? "expert " : "", kind), a, b, by, {}},
              std::move(x),
              std::move(y),
              whole,
              axis_a,
              axis_b,
              expert_};
    pair.relation.found = agreement(pair.a, pair.b);
    pairs_.push_back(std::move(pair));
  }

  /// Columns of `consumer` by the rows of its producer that were decoded.
  static std::vector<double> read_channels(const model::InputGroup& group, const Energies& producer,
                                           std::span<const double> columns) {
    std::vector<double> sums(static_cast<size_t>(producer.n));
    for (size_t col = 0; col < columns.size(); ++col) {
      sums[static_cast<size_t>(group.producer_channel(static_cast<int64_t>(col)))] += std::exp(columns[col]);
    }
    std::vector<double> result;
    for (const int64_t row : producer.rows_taken) result.push_back(std::log(sums[static_cast<size_t>(row)]));
    return result;
  }

  void look_at_layer(int64_t layer) {
    const auto& groups = groups_[static_cast<size_t>(layer)];
    for (const auto& group : groups) {
      expert_ = group.expert.value_or(-1);
      add_rotary(layer, group);
      for (size_t i = 0; i < group.linears.size(); ++i) {
        for (size_t j = i + 1; j < group.linears.size(); ++j) add_inputs(layer, group.linears[i], group.linears[j]);
      }
      add_stack(layer, groups, group);
      if (group.producer.empty()) continue;
      for (const auto& linear : group.linears)
        add_channels(layer, group, group.producer, linear.name, Relation::Kind::channels);
      add_gate(layer, groups, group);
    }
  }

  // ---- gates and ups in one matrix ----

  /// Energies of the rows of ups that were decoded, and of the columns of `down` that read them.
  static std::pair<std::vector<double>, std::vector<double>> ups_and_columns(const Energies& gate_up,
                                                                             const Energies& down,
                                                                             const StackReading& reading) {
    std::pair<std::vector<double>, std::vector<double>> series;
    for (size_t i = 0; i < gate_up.rows.size(); ++i) {
      const int64_t channel = reading.channel(gate_up.rows_taken[i], gate_up.n / 2);
      if (channel < 0) continue;
      series.first.push_back(gate_up.rows[i]);
      series.second.push_back(down.cols[static_cast<size_t>(channel)]);
    }
    return series;
  }

  void add_stack(int64_t layer, const std::vector<model::InputGroup>& groups, const model::InputGroup& group) {
    if (group.linears.front().role != model::Role::gate_up) return;
    const auto reads = [&](const model::InputGroup& other) {
      return other.expert == group.expert && other.linears.front().role == model::Role::down && other.producer.empty();
    };
    const auto reader = std::ranges::find_if(groups, reads);
    if (reader == groups.end()) return;
    const std::string &from = group.name(), &to = reader->name();
    const Energies *a = find(from), *b = find(to);
    if (a == nullptr || b == nullptr || a->n != 2 * b->k) return;
    auto [rows, cols] = ups_and_columns(*a, *b, stack_readings[orders_.in_turn ? 1 : 0]);
    add(layer, from, "rows", to, "columns", Relation::Kind::stack, std::move(rows), std::move(cols), false);
  }

  template <class Consider>
  void look_at_stack(const Pair& pair, const Consider& consider) {
    for (const StackReading& reading : stack_readings) {
      const auto [rows, cols] = ups_and_columns(*find(pair.relation.a), *find(pair.relation.b), reading);
      consider(agreement(rows, cols), std::string(reading.name), pair.relation.a);
    }
    for (const Pair& at : pairs_) {
      if (&at == &pair || at.relation.by != Relation::Kind::stack || !could_be_exchanged(pair, at)) continue;
      if (at.a.size() != pair.a.size()) continue;
      consider_elsewhere(pair, at, consider);
    }
  }

  /// Of two pairs that are both better off with each other's: one alone may have been added to the model, and not trained.
  template <class Consider>
  void consider_elsewhere(const Pair& pair, const Pair& at, const Consider& consider) const {
    if (!is_weak(at) || !have_nothing_in_common(at.a, pair.a) || !have_nothing_in_common(at.b, pair.b)) return;
    const Agreement here = agreement(at.a, pair.b), there = agreement(pair.a, at.b);
    if (!is_better(there, at.relation.found, true)) return;
    consider(here, concat("with those of ", at.relation.a, " in their place"), pair.relation.a);
    if (is_better(here, pair.relation.found, true))
      consider(there, concat("with those of ", at.relation.b, " in their place"), pair.relation.b);
  }

  static bool have_nothing_in_common(std::span<const double> one, std::span<const double> other) {
    return std::abs(agreement(one, other).value) < most_in_common;
  }

  // ---- queries and keys ----

  /// Which rows of a head turn together: half a head apart, neighbours, or a quarter apart, where halves were taken for
  /// neighbours and sorted once more.
  enum class Turns { halves, neighbours, quarters };

  /// Sums over the two rows of each pair that turns together and, of queries, over the heads that share a key's.
  std::vector<double> turning_pairs(std::span<const double> rows, size_t key_heads, Turns turns) const {
    const auto width = static_cast<size_t>(orders_.head_dim), half = width / 2;
    const size_t shared = rows.size() / width / key_heads;
    const auto pair_of = [&](size_t row) {
      if (turns == Turns::quarters) return row / half * (half / 2) + row % half % (half / 2);
      return turns == Turns::neighbours ? row / 2 : row % half;
    };
    std::vector<double> sums(key_heads * half);
    for (size_t i = 0; i < rows.size(); ++i) sums[i / width / shared * half + pair_of(i % width)] += std::exp(rows[i]);
    for (double& sum : sums) sum = std::log(sum);
    return sums;
  }

  Turns turns() const noexcept { return orders_.neighbours ? Turns::neighbours : Turns::halves; }

  /// What a pair of queries is multiplied with is the same pair of keys, whatever the angle: training leaves the two
  /// equally large.
  void add_rotary(int64_t layer, const model::InputGroup& group) {
    const auto of = [&](model::Role role) -> const model::PlannedLinear* {
      const auto found = std::ranges::find(group.linears, role, &model::PlannedLinear::role);
      return found == group.linears.end() ? nullptr : &*found;
    };
    const auto *query = of(model::Role::query), *key = of(model::Role::key);
    if (query == nullptr || key == nullptr || orders_.head_dim < 4 || orders_.head_dim % 4 != 0) return;
    const Energies *a = find(query->name), *b = find(key->name);
    const bool whole = a != nullptr && b != nullptr && std::ssize(a->rows) == a->n && std::ssize(b->rows) == b->n;
    if (!whole || b->n % orders_.head_dim != 0 || a->n % b->n != 0) return;
    const auto heads = static_cast<size_t>(b->n / orders_.head_dim);
    add(layer, query->name, "rows", key->name, "rows", Relation::Kind::rotary, turning_pairs(a->rows, heads, turns()),
        turning_pairs(b->rows, heads, turns()), false);
  }

  /// Sizes of rows change slowly within a head, so that neighbours agree, too, whatever turns together: another pairing is
  /// asked for within a model whose other layers have this one, or where hardly any layer has it.
  bool may_turn_otherwise(const Pair& pair) const {
    const double usual = medians_.find(pair.relation.kind)->second;
    const bool inside = pair.relation.layer > 0 && pair.relation.layer + 1 < std::ssize(groups_);
    return usual < least_agreement / 2 || (inside && usual > 0.5);
  }

  template <class Consider>
  void look_at_turns(const Pair& pair, const Consider& consider) {
    const Energies &a = *find(pair.relation.a), &b = *find(pair.relation.b);
    const auto heads = static_cast<size_t>(b.n / orders_.head_dim);
    constexpr std::pair<Turns, std::string_view> readings[] = {
        {Turns::halves, "as heads whose halves turn together"},
        {Turns::neighbours, "as heads whose neighbouring rows turn together"},
        {Turns::quarters, "as heads whose halves were taken for neighbours, and sorted once more"}};
    for (const auto& [other, what] : readings) {
      if (other == turns() || !may_turn_otherwise(pair)) continue;
      consider(agreement(turning_pairs(a.rows, heads, other), turning_pairs(b.rows, heads, other)), std::string(what),
               {});
    }
    // One of the two was sorted, the other was not.
    for (const Turns other : {Turns::halves, Turns::neighbours}) {
      if (other == turns() || !may_turn_otherwise(pair)) continue;
      consider(agreement(turning_pairs(a.rows, heads, other), pair.b),
               "with the rows of its heads sorted, of one alone", pair.relation.a);
      consider(agreement(pair.a, turning_pairs(b.rows, heads, other)),
               "with the rows of its heads sorted, of one alone", pair.relation.b);
    }
    const auto turned = [&](const Energies& energies, const std::string& linear, bool first) {
      if (energies.n != energies.k || energies.cols.size() != energies.rows.size()) return;
      auto pairs = turning_pairs(energies.cols, heads, turns());
      consider(first ? agreement(pairs, pair.b) : agreement(pair.a, pairs), "transposed", linear);
    };
    turned(a, pair.relation.a, true), turned(b, pair.relation.b, false);
    for (const Pair& at : pairs_) {
      if (&at == &pair || at.relation.by != Relation::Kind::rotary || at.a.size() != pair.a.size()) continue;
      consider_elsewhere(pair, at, consider);
    }
  }

  void add_inputs(int64_t layer, const model::PlannedLinear& first, const model::PlannedLinear& second) {
    const Energies *a = find(first.name), *b = find(second.name);
    if (a == nullptr || b == nullptr || a->k != b->k) return;
    add(layer, first.name, "columns", second.name, "columns", Relation::Kind::inputs, a->cols, b->cols, true);
  }

  void add_channels(int64_t layer, const model::InputGroup& group, const std::string& producer,
                    const std::string& consumer, Relation::Kind by) {
    const Energies *a = find(producer), *b = find(consumer);
    if (a == nullptr || b == nullptr || b->k != group.width) return;
    const bool whole = a->rows.size() == static_cast<size_t>(a->n);
    add(layer, producer, "rows", consumer, "columns", by, a->rows, read_channels(group, *a, b->cols), whole);
    pairs_.back().group = &group;
  }

  /// The gate is multiplied with what the producer writes, channel by channel.
  void add_gate(int64_t layer, const std::vector<model::InputGroup>& groups, const model::InputGroup& group) {
    for (const auto& other : groups) {
      const auto is_producer = [&](const auto& linear) { return linear.name == group.producer; };
      if (std::ranges::none_of(other.linears, is_producer)) continue;
      for (const auto& linear : other.linears) {
        if (linear.role != model::Role::gate) continue;
        add_channels(layer, group, linear.name, group.linears.front().name, Relation::Kind::gate);
        const Energies *a = find(linear.name), *b = find(group.producer);
        if (a == nullptr || b == nullptr || a->rows_taken != b->rows_taken) continue;
        const bool whole = a->rows.size() == static_cast<size_t>(a->n);
        add(layer, linear.name, "rows", group.producer, "rows", Relation::Kind::gate, a->rows, b->rows, whole);
      }
    }
  }

  // ---- other readings ----

  struct Hit {
    const Pair* pair;
    Agreement better;
    std::string reading;
    std::string suspect;  ///< the linear that it is about; empty: either
  };

  /// Whether what two experts have in common is there in most of a model: else other readings say nothing, and would be
  /// looked for in thousands of them.
  void measure_kinds() {
    std::map<std::string, std::vector<double>> values;
    for (const Pair& pair : pairs_) values[pair.relation.kind].push_back(std::abs(pair.relation.found.value));
    for (auto& [kind, found] : values) {
      const auto middle = found.begin() + static_cast<std::ptrdiff_t>(found.size() / 2);
      std::ranges::nth_element(found, middle);
      medians_[kind] = *middle;
      if (*middle > least_agreement) related_kinds_.insert(kind);
    }
  }

  static bool is_weak(const Pair& pair) {
    const double found = pair.relation.found.value;
    return pair.relation.by == Relation::Kind::rotary ? found < least_agreement : std::abs(found) < least_agreement / 2;
  }

  static bool is_better(const Agreement& other, const Agreement& found, bool sign) {
    const double value = sign ? other.value : std::abs(other.value);
    return value > least_agreement && value > times_better * std::abs(found.value) &&
           std::abs(other.sigmas()) - std::abs(found.sigmas()) > surely;
  }

  void look_at(const Pair& pair) {
    const Agreement& found = pair.relation.found;
    // Of stacks another order is asked for in all: whoever writes one so writes all so.
    const bool related =
        pair.expert < 0 || pair.relation.by == Relation::Kind::stack || related_kinds_.contains(pair.relation.kind);
    if (!is_weak(pair) || !related) return;
    std::optional<Hit> best;
    const auto consider = [&](const Agreement& other, const std::string& reading, const std::string& suspect) {
      if (!is_better(other, found, pair.relation.by != Relation::Kind::inputs)) return;
      if (pair.relation.by == Relation::Kind::rotary && other.value < least_of_turns) return;
      if (best && std::abs(best->better.value) >= std::abs(other.value)) return;
      best = Hit{&pair, other, reading, suspect};
    };
    for (const ChannelOrder& order : channel_orders()) {
      if (!pair.whole || pair.a.size() % order.multiple != 0) continue;
      // Where channels are as those that stand there are, an order says nothing.
      const auto moved = reordered(pair.a, order);
      if (have_nothing_in_common(moved, pair.a)) consider(agreement(moved, pair.b), std::string(order.name), {});
    }
    if (pair.relation.by == Relation::Kind::channels) look_elsewhere(pair, consider);
    if (pair.relation.by == Relation::Kind::rotary) look_at_turns(pair, consider);
    if (pair.relation.by == Relation::Kind::stack) look_at_stack(pair, consider);
    if (best) hits_.push_back(std::move(*best));
  }

  /// Of experts those of the same mixture or of the same number: there are thousands.
  static bool could_be_exchanged(const Pair& pair, const Pair& other) {
    return pair.expert < 0 || other.expert < 0 || pair.expert == other.expert ||
           pair.relation.layer == other.relation.layer;
  }

  template <class Consider>
  void look_elsewhere(const Pair& pair, const Consider& consider) {
    for (const Pair& other : pairs_) {
      if (&other == &pair || other.relation.by != pair.relation.by || !could_be_exchanged(pair, other)) continue;
      const bool alike = other.relation.kind == pair.relation.kind && other.a.size() == pair.a.size();
      const bool others = other.relation.a != pair.relation.a && other.relation.b != pair.relation.b;
      if (alike && others) consider_elsewhere(pair, other, consider);
    }
    // Not those of the same layer: what one writes and another reads is scaled by whoever folds, after what a third says.
    look_transposed(pair, consider);
  }

  template <class Consider>
  void look_transposed(const Pair& pair, const Consider& consider) {
    const auto first = [&](const Pair& at) { return agreement(find(at.relation.a)->cols, at.b); };
    const auto second = [&](const Pair& at) {
      const Energies& reader = *find(at.relation.b);
      if (at.group == nullptr || reader.n != reader.k || std::ssize(reader.rows) != reader.n) return Agreement{};
      return agreement(at.a, read_channels(*at.group, *find(at.relation.a), reader.rows));
    };
    const Energies &a = *find(pair.relation.a), &b = *find(pair.relation.b);
    if (a.n == a.k && pair.whole && !others_read(pair, first)) consider(first(pair), "transposed", pair.relation.a);
    if (b.n == b.k && !others_read(pair, second)) {
      consider(second(pair), "transposed", pair.relation.b);
    }
  }

  /// Whether half of the other layers agree in this reading, too: loud channels that all weights have in common say
  /// nothing of which is right.
  template <class Reading>
  bool others_read(const Pair& pair, const Reading& reading) const {
    int others = 0, agree = 0;
    for (const Pair& other : pairs_) {
      if (&other == &pair || other.relation.kind != pair.relation.kind || other.a.size() != pair.a.size()) continue;
      ++others, agree += reading(other).value > least_agreement / 2;
    }
    return others > 0 && 2 * agree >= others;
  }

  void report_hits() {
    std::map<std::string, int> count;
    for (const Hit& hit : hits_) {
      if (hit.suspect.empty()) ++count[hit.pair->relation.a], ++count[hit.pair->relation.b];
      if (!hit.suspect.empty()) count[hit.suspect] += 2;
    }
    std::map<std::string, std::string> faults;
    for (const Hit& hit : hits_) {
      const Relation& relation = hit.pair->relation;
      const bool first = count[relation.a] >= count[relation.b];
      const std::string suspect = !hit.suspect.empty() ? hit.suspect : first ? relation.a : relation.b;
      const bool either = hit.suspect.empty() && count[relation.a] == count[relation.b];
      const bool rows_of_a = suspect == relation.a;
      faults.emplace(suspect,
                     concat(printable(suspect), ": energies of its ", rows_of_a ? hit.pair->axis_a : hit.pair->axis_b,
                            " agree with those of the ", rows_of_a ? hit.pair->axis_b : hit.pair->axis_a, " of ",
                            printable(rows_of_a ? relation.b : relation.a), " by ", fixed(relation.found.value, 2),
                            " as stored, by ", fixed(hit.better.value, 2), " ", printable(hit.reading), " (",
                            fixed(std::abs(hit.better.sigmas()), 0), " standard errors)",
                            either ? "; one of the two is wrong" : ""));
    }
    for (auto& [name, fault] : faults) report_.faults.push_back(std::move(fault)), named_.push_back(name);
  }

  // ---- relations that only one layer lacks ----

  void look_for_absent() {
    std::map<std::string, std::vector<const Pair*>> kinds;
    for (const Pair& pair : pairs_) kinds[pair.relation.kind].push_back(&pair);
    std::map<std::string, std::vector<std::string>> lacking;
    for (const auto& [kind, pairs] : kinds) {
      if (pairs.size() < 4 || pairs.front()->relation.by == Relation::Kind::gate) continue;
      const auto strength = [](const Pair* pair) { return std::abs(pair->relation.found.sigmas()); };
      const auto weakest = std::ranges::min_element(pairs, {}, strength);
      if (strength(*weakest) >= absent) continue;
      double least = INFINITY;
      for (const Pair* pair : pairs) least = pair == *weakest ? least : std::min(least, strength(pair));
      if (least < present) continue;
      const Relation& relation = (*weakest)->relation;
      const std::string what =
          concat(kind, " agree by ", fixed(relation.found.value, 2), " (", fixed(strength(*weakest), 1),
                 " standard errors), in every other layer by ", fixed(least, 0), " or more");
      lacking[relation.a].push_back(what);
      lacking[relation.b].push_back(what);
    }
    for (const auto& [name, reasons] : lacking) {
      if (std::ranges::find(named_, name) != named_.end()) continue;
      // Scales that were folded into one layer alone leave no more than that.
      report_.warnings.push_back(
          concat(printable(name), ": not related to the weights around it: ", join(reasons, "; ")));
    }
  }

  const LayerGroups& groups_;
  const RowOrders& orders_;
  const AllEnergies& energies_;
  int64_t expert_ = -1;  // of the group that is looked at
  std::set<std::string> related_kinds_;
  std::map<std::string, double> medians_;  // of agreements, by kind
  std::vector<Pair> pairs_;
  std::vector<Hit> hits_;
  std::vector<std::string> named_;
  EnergyReport report_;
};

/// Adds the squares of a row to those of columns, and returns their sum: in eight sums, which a processor adds side by
/// side.
double add_squares(const float* row, std::span<float> columns) {
  float sums[8] = {};
  size_t c = 0;
  for (; c + 8 <= columns.size(); c += 8) {
    for (size_t i = 0; i < 8; ++i) {
      const float square = row[c + i] * row[c + i];
      columns[c + i] += square, sums[i] += square;
    }
  }
  double sum = 0;
  for (; c < columns.size(); ++c) {
    const float square = row[c] * row[c];
    columns[c] += square, sum += double{square};
  }
  for (const float each : sums) sum += double{each};
  return sum;
}

/// Copies what is kept of `count` rows from `first` on.
void keep_values(int64_t first, int64_t count, std::span<const float> values, KeptValues& kept) {
  const auto& [rows, cols] = kept.range;
  const size_t width = values.size() / static_cast<size_t>(count);
  for (auto at = std::ranges::lower_bound(rows, first); at != rows.end() && *at < first + count; ++at) {
    const auto row = values.subspan(static_cast<size_t>(*at - first) * width, width);
    uint16_t* out = kept.values.data() + static_cast<size_t>(at - rows.begin()) * cols.size();
    for (size_t i = 0; i < cols.size(); ++i) out[i] = bf16_from_f32(row[static_cast<size_t>(cols[i])]);
  }
}

/// `decode(first, count, values)`: rows [count, k] from `first` on.
Energies energies_by(int64_t n, int64_t k, const EnergySample& sample, const KeptRange& keep,
                     const std::function<void(int64_t, int64_t, float*)>& decode) {
  Energies result{.n = n, .k = k, .rows_taken = taken_rows(n, k, sample), .rows = {}, .cols = {}};
  result.kept = {keep, std::vector<uint16_t>(keep.rows.size() * keep.cols.size())};
  const auto taken = static_cast<int64_t>(result.rows_taken.size());
  const auto width = static_cast<size_t>(k);
  const int64_t blocks = (taken + block_rows - 1) / block_rows;
  constexpr int64_t together = 8;
  const int64_t parts = (blocks + together - 1) / together;
  result.rows.resize(static_cast<size_t>(taken));
  std::vector<std::vector<double>> sums(static_cast<size_t>(parts));
  parallel_for(parts, 1, [&](int64_t first, int64_t last) {
    std::vector<float> values(static_cast<size_t>(block_rows) * width), squares(width);
    for (int64_t part = first; part < last; ++part) {
      auto& cols = sums[static_cast<size_t>(part)];
      cols.assign(width, 0.0);
      for (int64_t block = part * together; block < std::min((part + 1) * together, blocks); ++block) {
        const int64_t at = block * block_rows, count = std::min(block_rows, taken - at);
        const int64_t begin = result.rows_taken[static_cast<size_t>(at)];
        decode(begin, count, values.data());
        if (!keep.rows.empty()) {
          keep_values(begin, count, std::span(values).first(static_cast<size_t>(count) * width), result.kept);
        }
        std::ranges::fill(squares, 0.0f);
        for (int64_t r = 0; r < count; ++r) {
          const double sum = add_squares(values.data() + static_cast<size_t>(r) * width, squares);
          result.rows[static_cast<size_t>(at + r)] = std::log(sum);
        }
        for (size_t c = 0; c < width; ++c) cols[c] += double{squares[c]};
      }
    }
  });
  result.cols.assign(width, 0.0);
  for (const auto& part : sums) {
    for (size_t c = 0; c < width; ++c) result.cols[c] += part[c];
  }
  const double total = std::accumulate(result.cols.begin(), result.cols.end(), 0.0);
  result.mean = std::log(total / static_cast<double>(taken * k));
  for (double& value : result.cols) value = std::log(value);
  return result;
}

}  // namespace

std::vector<int64_t> taken_rows(int64_t n, int64_t k, const EnergySample& sample) {
  const int64_t blocks = (n + block_rows - 1) / block_rows;
  const int64_t taken =
      n * k <= sample.all_up_to ? blocks : std::clamp<int64_t>(sample.taken / (block_rows * k), 1, blocks);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t first = i * blocks / taken * block_rows;
    for (int64_t row = first; row < std::min(first + block_rows, n); ++row) rows.push_back(row);
  }
  return rows;
}

double Agreement::sigmas() const noexcept {
  // Of rank correlations, 6 % more than of others.
  return count > 4 ? std::atanh(std::clamp(value, -0.999999, 0.999999)) * std::sqrt((count - 3) / 1.06) : 0;
}

Agreement agreement(std::span<const double> a, std::span<const double> b) {
  std::vector<double> x, y;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) continue;
    x.push_back(a[i]), y.push_back(b[i]);
  }
  if (x.size() < 4 * channel_neighbours) return {};
  x = ranks_beside_neighbours(std::move(x)), y = ranks_beside_neighbours(std::move(y));
  const double middle = static_cast<double>(x.size() - 1) / 2;
  double product = 0, squares_x = 0, squares_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    product += (x[i] - middle) * (y[i] - middle);
    squares_x += (x[i] - middle) * (x[i] - middle), squares_y += (y[i] - middle) * (y[i] - middle);
  }
  // Blocks of neighbours take one degree of freedom each.
  const auto count = static_cast<double>(x.size()) * (1 - 1.0 / channel_neighbours);
  const double norm = std::sqrt(squares_x * squares_y);
  return {norm > 0 ? product / norm : 0, count};
}

Energies energies_of(const kernels::LinearWeight& weight, const EnergySample& sample, const KeptRange& keep) {
  return energies_by(weight.n, weight.k, sample, keep, [&](int64_t begin, int64_t count, float* values) {
    kernels::decode_rows(weight, begin, begin + count, {values, count, weight.k});
  });
}

Energies energies_of(int64_t n, int64_t k, const io::RowReader& read, const EnergySample& sample,
                     const KeptRange& keep) {
  return energies_by(n, k, sample, keep, [&](int64_t begin, int64_t count, float* values) {
    for (int64_t row = 0; row < count; ++row) read(begin + row, {values + row * k, static_cast<size_t>(k)});
  });
}

std::map<std::string, EnergySample, std::less<>> energy_samples(const LayerGroups& groups) {
  int64_t of_experts = 0;
  for (const auto& layer : groups) {
    for (const auto& group : layer) {
      for (const auto& linear : group.linears) {
        if (group.expert) of_experts += std::min(linear.n * linear.k, of_expert.taken);
      }
    }
  }
  const int64_t each = std::max<int64_t>(1, (of_experts + of_all_experts - 1) / of_all_experts);
  std::map<std::string, EnergySample, std::less<>> samples;
  for (const auto& layer : groups) {
    for (const auto& group : layer) {
      if (group.expert.value_or(0) % each != 0) continue;
      for (const auto& linear : group.linears) samples.emplace(linear.name, group.expert ? of_expert : EnergySample{});
    }
  }
  return samples;
}

RowOrders row_orders(const model::OpenedModel& model) {
  const auto& config = model.config;
  RowOrders orders;
  orders.in_turn = config.mixture.storage == model::ExpertStorage::stacked_in_turn;
  const bool plain = config.architecture != nullptr && !config.qk_norm && config.attention.empty() &&
                     config.delta_layers.empty() && config.rope.partial_rotary_factor == 1;
  if (plain) orders.head_dim = config.head_dim, orders.neighbours = config.rope.neighbours;
  return orders;
}

namespace {

/// How far rows of queries differ in size, over what any two rows of a head do: of those a quarter of a head apart, within its
/// halves, as stored and as they stood if halves had been taken for neighbours and sorted; half a head apart; neighbours.
struct RowsApart {
  double stored = 0, unsorted = 0, halves = 0, neighbours = 0;
};

/// `rows`: logarithms, of whole heads of `width`.
std::optional<RowsApart> rows_apart(std::span<const double> rows, size_t width) {
  RowsApart found;
  double spread = 0, pairs = 0;
  for (size_t head = 0; head + width <= rows.size(); head += width) {
    const auto of_head = rows.subspan(head, width);
    if (!std::ranges::all_of(of_head, [](double row) { return std::isfinite(row); })) return std::nullopt;
    const double mean = std::accumulate(of_head.begin(), of_head.end(), 0.0) / static_cast<double>(width);
    for (const double row : of_head) spread += (row - mean) * (row - mean);
    // Row i of halves that were neighbours stood at 2i, of the second half at 2i + 1.
    const auto before = [&](size_t at) { return of_head[at % 2 * (width / 2) + at / 2]; };
    for (size_t half = 0; half < width; half += width / 2) {
      for (size_t i = half; i < half + width / 4; ++i) {
        const double stored = of_head[i] - of_head[i + width / 4], unsorted = before(i) - before(i + width / 4);
        found.stored += stored * stored, found.unsorted += unsorted * unsorted, pairs += 1;
      }
    }
    for (size_t i = 0; i < width / 2; ++i) {
      const double halves = of_head[i] - of_head[i + width / 2], neighbours = of_head[2 * i] - of_head[2 * i + 1];
      found.halves += halves * halves, found.neighbours += neighbours * neighbours;
    }
  }
  if (!(spread > 0)) return std::nullopt;
  const double usual = 2 * spread / static_cast<double>(rows.size());
  for (double* sum : {&found.stored, &found.unsorted, &found.halves, &found.neighbours}) *sum /= pairs * usual;
  return found;
}

/// Rows turn by angles that grow from one to the next, half a head long, and sizes change with them: the two that turn
/// together are as large, and rows a quarter of a head apart differ more than any two do. Sorted once, for neighbours that
/// turn together, they stand beside each other; where halves were taken for neighbours, a quarter of a head apart, and
/// neighbours agree as halves did, so that no relation to the keys says it.
class RowSizes {
 public:
  RowSizes(const LayerGroups& groups, const RowOrders& orders, const AllEnergies& energies) {
    const auto width = static_cast<size_t>(std::max<int64_t>(0, orders.head_dim));
    if (orders.neighbours || width < 16 || width % 4 != 0) return;
    for (const auto& layer : groups) {
      for (const auto& group : layer) {
        for (const auto& linear : group.linears) {
          const auto found = energies.find(linear.name);
          if (linear.role == model::Role::query && found != energies.end()) add(linear.name, found->second, width);
        }
      }
    }
  }

  /// Empty: as sound ones are, or nothing is known.
  std::string fault() const {
    constexpr size_t fewest_layers = 4, fewest_rows = 1024;
    if (layers_.size() < fewest_layers || rows_ < fewest_rows) return {};
    const std::string begin = concat(printable(first_), ": its rows, and those of all layers, ");
    if (holds(&RowsApart::stored, &RowsApart::unsorted)) {
      return concat(
          begin, "a quarter of a head apart differ in size by ", fixed(mean(&RowsApart::stored), 2),
          " times what any two of a head do, by ", fixed(mean(&RowsApart::unsorted), 2),
          " times with halves and neighbours exchanged, as sound ones do: heads were sorted for neighbours that ",
          "turn together, and they were halves");
    }
    if (holds(&RowsApart::neighbours, &RowsApart::halves)) {
      return concat(begin, "half a head apart differ in size by ", fixed(mean(&RowsApart::halves), 2),
                    " times what any two of a head do, neighbours by ", fixed(mean(&RowsApart::neighbours), 2),
                    " times: neighbours turn together, by config.json halves do");
    }
    return {};
  }

  /// Of one layer where the others are sound: what a relation to the keys does not say where these were sorted, too.
  std::vector<std::string> lone_faults() const {
    std::vector<std::string> faults;
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!others_are_sound(layer)) continue;
      const RowsApart& own = layers_[layer];
      constexpr double together = 0.8, apart = 1.2;
      const bool once = own.stored < together && own.unsorted > apart;
      const bool twice = own.stored < 1 && own.halves > apart && own.neighbours < together;
      if (!once && !twice) continue;
      faults.push_back(concat(printable(names_[layer]), ": its rows ",
                              once ? "a quarter of a head apart" : "beside each other", " differ in size by ",
                              fixed(once ? own.stored : own.neighbours, 2), " times what any two of a head do, ",
                              once ? "with halves and neighbours exchanged" : "those half a head apart", " by ",
                              fixed(once ? own.unsorted : own.halves, 2),
                              " times, and those of the other layers do not: its heads were sorted ",
                              once ? "for neighbours that turn together, and they were halves" : "once more"));
    }
    return faults;
  }

 private:
  /// Whether of six and more others nearly all have rows as halves that turn together leave them.
  bool others_are_sound(size_t layer) const {
    constexpr size_t fewest_others = 6;
    constexpr double most_layers = 0.75;
    size_t sound = 0;
    for (size_t other = 0; other < layers_.size(); ++other) {
      sound += other != layer && layers_[other].stored > 1.15 && layers_[other].unsorted < 1;
    }
    const size_t others = layers_.size() - std::min<size_t>(layers_.size(), 1);
    return others >= fewest_others && static_cast<double>(sound) >= most_layers * static_cast<double>(others);
  }

  void add(const std::string& name, const Energies& queries, size_t width) {
    if (std::ssize(queries.rows) != queries.n || queries.rows.size() % width != 0) return;
    const auto here = rows_apart(queries.rows, width);
    if (!here) return;
    if (layers_.empty()) first_ = name;
    layers_.push_back(*here), names_.push_back(name), rows_ += queries.rows.size();
  }

  double mean(double RowsApart::*what) const {
    double sum = 0;
    for (const RowsApart& layer : layers_) sum += layer.*what;
    return sum / static_cast<double>(layers_.size());
  }

  /// Whether the one is small and the other large, and in most layers smaller than it.
  bool holds(double RowsApart::*small, double RowsApart::*large) const {
    constexpr double together = 0.85, apart = 1.15, most_layers = 0.75;
    const auto turned = std::ranges::count_if(layers_, [&](const RowsApart& l) { return l.*small < l.*large; });
    return mean(small) < together && mean(large) > apart &&
           static_cast<double>(turned) >= most_layers * static_cast<double>(layers_.size());
  }

  std::vector<RowsApart> layers_;
  std::vector<std::string> names_;
  std::string first_;
  size_t rows_ = 0;
};

}  // namespace

EnergyReport check_energies(const LayerGroups& groups, const RowOrders& orders, const AllEnergies& energies) {
  EnergyReport report = EnergyCheck(groups, orders, energies).run();
  const auto named = [](const std::string& fault) { return fault.find("neighbouring rows turn") != std::string::npos; };
  const RowSizes sizes(groups, orders, energies);
  if (std::string fault = sizes.fault(); !fault.empty() && std::ranges::none_of(report.faults, named)) {
    report.faults.push_back(std::move(fault));
  }
  for (std::string& fault : sizes.lone_faults()) {
    const std::string_view name = std::string_view(fault).substr(0, fault.find(':'));
    const auto says = [&](const std::string& other) { return other.starts_with(name); };
    if (std::ranges::none_of(report.faults, says)) report.faults.push_back(std::move(fault));
  }
  return report;
}

}  // namespace w4q::verify
