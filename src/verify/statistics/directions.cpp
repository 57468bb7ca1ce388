#include "verify/statistics/directions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <span>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/statistics/orders.h"

namespace w4q::verify {
namespace {

using model::InputGroup;
using model::PlannedLinear;
using model::Role;
using EnergiesByName = std::map<std::string, Energies, std::less<>>;

/// Standard errors: of what points nowhere in common, of what does in another reading, of what does beyond any doubt.
constexpr double points_elsewhere = 5, points_along = 12, points_surely = 8, heads_along = 10;
/// By how much another reading must say more.
constexpr double as_clearly = 3;
/// Means of cosines over their own spread: of an up and its down in some layer, and of gates, which have no side.
constexpr double one_sided = 8, some_side = 5, no_side = 4;
constexpr size_t fewest_pairs = 64;
/// What one pair counts at most, in standard deviations of chance.
constexpr double most_of_pair = 4;

// ---- what is kept ----

struct Neurons {
  int64_t layer = 0, expert = -1;
  const PlannedLinear *gate = nullptr, *up = nullptr, *down = nullptr;
};

struct Heads {
  int64_t layer = 0;
  const PlannedLinear *query = nullptr, *key = nullptr, *value = nullptr, *output = nullptr;
  const InputGroup* reads = nullptr;  ///< that of the output
};

const PlannedLinear* of_role(const InputGroup& group, Role role) {
  const auto found = std::ranges::find(group.linears, role, &PlannedLinear::role);
  return found == group.linears.end() ? nullptr : &*found;
}

template <class Take>
void for_each_part(const LayerGroups& layers, const Take& take) {
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    std::map<std::string_view, const InputGroup*> writers;
    for (const InputGroup& group : layers[layer]) {
      for (const PlannedLinear& linear : group.linears) writers.emplace(linear.name, &group);
    }
    for (const InputGroup& group : layers[layer]) {
      const auto writer = group.producer.empty() ? writers.end() : writers.find(group.producer);
      if (writer != writers.end()) take(static_cast<int64_t>(layer), group, *writer->second);
    }
  }
}

std::vector<Neurons> neurons_of(const LayerGroups& layers) {
  std::vector<Neurons> all;
  for_each_part(layers, [&](int64_t layer, const InputGroup& group, const InputGroup& writer) {
    const Neurons part{layer, group.expert.value_or(-1), of_role(writer, Role::gate), of_role(writer, Role::up),
                       of_role(group, Role::down)};
    const bool whole = part.gate != nullptr && part.up != nullptr && part.down != nullptr;
    if (whole && part.gate->n == part.up->n && part.gate->k == part.up->k && part.down->k == part.up->n)
      all.push_back(part);
  });
  return all;
}

std::vector<Heads> heads_of(const LayerGroups& layers) {
  std::vector<Heads> all;
  for_each_part(layers, [&](int64_t layer, const InputGroup& group, const InputGroup& writer) {
    const Heads part{layer,
                     of_role(writer, Role::query),
                     of_role(writer, Role::key),
                     of_role(writer, Role::value),
                     of_role(group, Role::output),
                     &group};
    if (part.value != nullptr && part.output != nullptr) all.push_back(part);
  });
  return all;
}

/// `most` of `all` in blocks of 16 that are spread evenly.
std::vector<int64_t> spread(const std::vector<int64_t>& all, size_t most) {
  constexpr size_t together = 16;
  if (all.size() <= most) return all;
  const size_t blocks = all.size() / together, taken = std::clamp<size_t>(most / together, 1, blocks);
  std::vector<int64_t> result;
  for (size_t i = 0; i < taken; ++i) {
    const size_t first = i * blocks / taken * together;
    for (size_t at = first; at < first + together; ++at) result.push_back(all[at]);
  }
  return result;
}

/// Channels of the stream that are kept: the more, the better is known what points where, and small models have few rows.
size_t channels_of(const PlannedLinear& writer) { return writer.n * writer.k > int64_t{1} << 20 ? 128 : 192; }

class Keeper {
 public:
  explicit Keeper(const std::map<std::string, EnergySample, std::less<>>& samples) : samples_(samples) {}

  void keep(const Neurons& part, size_t channels, size_t neurons) {
    if (!is_decoded(part.gate) || !is_decoded(part.up) || !is_decoded(part.down)) return;
    const auto stream = spread(rows_of(*part.down), channels), inner = spread(rows_of(*part.up), neurons);
    kept_[part.gate->name] = kept_[part.up->name] = {inner, stream};
    kept_[part.down->name] = {stream, inner};
  }

  void keep(const Heads& part, size_t channels, size_t rows) {
    if (!is_decoded(part.value) || !is_decoded(part.output)) return;
    const auto stream = spread(rows_of(*part.output), channels);
    for (const PlannedLinear* linear : {part.query, part.key, part.value}) {
      if (!is_decoded(linear) || linear->k != part.output->n) continue;
      kept_[linear->name] = {spread(rows_of(*linear), linear == part.query ? 2 * rows : rows), stream};
    }
    const std::vector<int64_t>& values = kept_[part.value->name].rows;
    std::vector<int64_t> columns;
    for (int64_t col = 0; col < part.output->k; ++col) {
      if (std::ranges::binary_search(values, part.reads->producer_channel(col))) columns.push_back(col);
    }
    kept_[part.output->name] = {stream, std::move(columns)};
  }

  std::map<std::string, KeptRange, std::less<>> kept() && { return std::move(kept_); }

 private:
  bool is_decoded(const PlannedLinear* linear) const { return linear != nullptr && samples_.contains(linear->name); }
  std::vector<int64_t> rows_of(const PlannedLinear& linear) const {
    return taken_rows(linear.n, linear.k, samples_.find(linear.name)->second);
  }

  const std::map<std::string, EnergySample, std::less<>>& samples_;
  std::map<std::string, KeptRange, std::less<>> kept_;
};

// ---- directions ----

/// Rows, or columns, of unit length by the channel that they are of; those of nothing are left out.
struct Pointers {
  std::vector<int64_t> channels;  ///< ascending
  size_t width = 0;
  std::vector<float> values;

  std::span<const float> at(size_t i) const { return std::span(values).subspan(i * width, width); }
  std::optional<size_t> find(int64_t channel) const {
    const auto found = std::ranges::lower_bound(channels, channel);
    if (found == channels.end() || *found != channel) return std::nullopt;
    return static_cast<size_t>(found - channels.begin());
  }
};

double cosine(std::span<const float> a, std::span<const float> b) {
  float sums[8] = {};
  size_t i = 0;
  for (; i + 8 <= a.size(); i += 8) {
    for (size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  double sum = 0;
  for (; i < a.size(); ++i) sum += double{a[i]} * double{b[i]};
  for (const float each : sums) sum += double{each};
  return sum;
}

/// What is kept, as [inner channels, stream channels]; `of_columns`: the weight writes the stream.
std::vector<float> as_inner(const KeptValues& kept, bool of_columns) {
  const size_t rows = kept.range.rows.size(), cols = kept.range.cols.size();
  std::vector<float> values(rows * cols);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t col = 0; col < cols; ++col) {
      values[of_columns ? col * rows + row : row * cols + col] = f32_from_bf16(kept.values[row * cols + col]);
    }
  }
  return values;
}

/// Adds the squares of each stream channel.
void add_loudness(std::span<const float> values, std::vector<double>& loudness) {
  for (size_t i = 0; i < values.size(); ++i) loudness[i % loudness.size()] += double{values[i]} * double{values[i]};
}

Pointers pointers_of(const std::vector<int64_t>& channels, std::span<const float> values,
                     std::span<const double> loudness) {
  Pointers result{.channels = {}, .width = loudness.size(), .values = {}};
  std::vector<double> row(loudness.size());
  for (size_t i = 0; i < channels.size(); ++i) {
    double squares = 0;
    for (size_t c = 0; c < row.size(); ++c) {
      row[c] = loudness[c] > 0 ? double{values[i * row.size() + c]} / std::sqrt(loudness[c]) : 0;
      squares += row[c] * row[c];
    }
    if (!(squares > 0) || !std::isfinite(squares)) continue;
    result.channels.push_back(channels[i]);
    for (const double value : row) result.values.push_back(static_cast<float>(value / std::sqrt(squares)));
  }
  return result;
}

/// Those of linears that read one stream: how loud its channels are is in all of them.
std::vector<Pointers> readers_of(std::span<const Energies* const> linears) {
  std::vector<std::vector<float>> values;
  std::vector<double> loudness(linears.front()->kept.range.cols.size());
  for (const Energies* one : linears) {
    values.push_back(as_inner(one->kept, false));
    add_loudness(values.back(), loudness);
  }
  std::vector<Pointers> result;
  for (size_t i = 0; i < linears.size(); ++i)
    result.push_back(pointers_of(linears[i]->kept.range.rows, values[i], loudness));
  return result;
}

Pointers writer_of(const Energies& linear) {
  const auto values = as_inner(linear.kept, true);
  std::vector<double> loudness(linear.kept.range.rows.size());
  add_loudness(values, loudness);
  return pointers_of(linear.kept.range.cols, values, loudness);
}

/// The channel of the other side that one belongs to.
using Partner = std::function<int64_t(int64_t)>;

/// How two sides point along or against each other.
class Alignment {
 public:
  Alignment(const Pointers& a, const Pointers& b) : a_(a), b_(b) { measure_chance(); }

  /// The mean squared cosine of partners, in standard errors of those that are none of each other's; 0 of too few.
  double sigmas(const Partner& partner) const { return sigmas_of(a_, partner); }
  /// The same with others in the place of the first side.
  double sigmas_of(const Pointers& others, const Partner& partner) const {
    double sum = 0, count = 0;
    for (size_t i = 0; i < others.channels.size() && others.width == b_.width; ++i) {
      const auto other = b_.find(partner(others.channels[i]));
      if (!other) continue;
      const double found = cosine(others.at(i), b_.at(*other));
      // Rows of which few codes are left may be each other's by chance: no pair says more than that it goes together.
      sum += std::min(found * found, mean_ + most_of_pair * deviation_), ++count;
    }
    return count < fewest_pairs || !(deviation_ > 0) ? 0 : (sum / count - mean_) / (deviation_ / std::sqrt(count));
  }

 private:
  void measure_chance() {
    constexpr size_t shifts = 8, most = 512;
    double sum = 0, squares = 0, count = 0;
    const size_t step = std::max<size_t>(1, a_.channels.size() / most);
    for (size_t i = 0; i < a_.channels.size() && !b_.channels.empty(); i += step) {
      const size_t own = i * b_.channels.size() / a_.channels.size();
      for (size_t shift = 1; shift <= shifts; ++shift) {
        // Not places that other readings know of: halves, or whole heads.
        const size_t by = shift * b_.channels.size() / (shifts + 1) + shift + 2;
        const double found = cosine(a_.at(i), b_.at((own + by) % b_.channels.size()));
        sum += found * found, squares += found * found * found * found, ++count;
      }
    }
    if (count < fewest_pairs) return;
    mean_ = sum / count;
    deviation_ = std::sqrt(std::max(0.0, squares / count - mean_ * mean_));
  }

  const Pointers &a_, &b_;
  double mean_ = 0, deviation_ = 0;
};

int64_t same(int64_t channel) { return channel; }

/// Sums of cosines of partners, whose sign is that of a side: an up and its down may be turned round together, so that
/// what they have in common has one; a gate has no side.
struct Leaning {
  double sum = 0, squares = 0;
  void add(const Pointers& a, const Pointers& b) {
    for (size_t i = 0; i < a.channels.size(); ++i) {
      const auto other = b.find(a.channels[i]);
      if (!other) continue;
      const double found = cosine(a.at(i), b.at(*other));
      sum += found, squares += found * found;
    }
  }
  void add(const Leaning& other) { sum += other.sum, squares += other.squares; }
  double sigmas() const { return squares > 0 ? std::abs(sum) / std::sqrt(squares) : 0; }
};

// ---- heads read otherwise ----

struct HeadShape {
  int64_t width = 0, heads = 0, shared = 1;  ///< `shared`: heads that have one key and value
  int64_t keys() const { return heads / shared; }
};

/// Of a channel of all heads, the one of keys or values that it belongs to.
struct HeadReading {
  std::string_view name;
  int64_t (*channel)(int64_t channel, const HeadShape& shape);
};
constexpr int64_t own_channel(int64_t channel, const HeadShape& shape) {
  return channel / shape.width / shape.shared * shape.width + channel % shape.width;
}
constexpr int64_t turned_in_head(int64_t channel, const HeadShape& shape, int64_t in_head) {
  return channel / shape.width / shape.shared * shape.width + in_head;
}
constexpr std::array<HeadReading, 9> head_readings{
    {{"with heads that share a key in turn, not beside each other",
      [](int64_t channel, const HeadShape& shape) {
        return channel / shape.width % shape.keys() * shape.width + channel % shape.width;
      }},
     {"with heads in reverse order",
      [](int64_t channel, const HeadShape& shape) {
        const int64_t head = shape.heads - 1 - channel / shape.width;
        return head / shape.shared * shape.width + channel % shape.width;
      }},
     {"with heads one place on",
      [](int64_t channel, const HeadShape& shape) {
        return own_channel((channel + shape.width) % (shape.heads * shape.width), shape);
      }},
     {"with heads one place back",
      [](int64_t channel, const HeadShape& shape) {
        const int64_t all = shape.heads * shape.width;
        return own_channel((channel + all - shape.width) % all, shape);
      }},
     {"with the heads of the next key",
      [](int64_t channel, const HeadShape& shape) {
        return (channel / shape.width / shape.shared + 1) % shape.keys() * shape.width + channel % shape.width;
      }},
     {"with the heads of the key before",
      [](int64_t channel, const HeadShape& shape) {
        return (channel / shape.width / shape.shared + shape.keys() - 1) % shape.keys() * shape.width +
               channel % shape.width;
      }},
     {"with channels of all heads in turn",
      [](int64_t channel, const HeadShape& shape) {
        return channel % shape.heads / shape.shared * shape.width + channel / shape.heads;
      }},
     {"with halves of its heads sorted as neighbours",
      [](int64_t channel, const HeadShape& shape) {
        const int64_t at = channel % shape.width, half = shape.width / 2;
        return turned_in_head(channel, shape, at % 2 * half + at / 2);
      }},
     {"with neighbours of its heads sorted as halves", [](int64_t channel, const HeadShape& shape) {
        const int64_t at = channel % shape.width, half = shape.width / 2;
        return turned_in_head(channel, shape, at % half * 2 + at / half);
      }}}};

// ---- the check ----

struct MlpSides {
  const Neurons* part;
  Pointers gate, up, down;
  double gate_up = 0, up_down = 0, gate_down = 0;
  Leaning of_ups, of_gates;
};

/// A linear, and what is wrong with it.
using Misdirected = std::pair<std::string, std::string>;

class DirectionCheck {
 public:
  DirectionCheck(const LayerGroups& groups, int64_t head_dim, bool is_known, const EnergiesByName& energies)
      : neurons_(neurons_of(groups)),
        heads_(heads_of(groups)),
        head_dim_(head_dim),
        is_known_(is_known),
        energies_(energies) {}

  std::map<std::string, std::string> run() {
    for (auto& sides : parallel_results(neurons_, [&](const Neurons& part) { return measure(part); })) {
      if (sides) add(std::move(*sides));
    }
    const auto together = std::ranges::count_if(mlps_, [](const auto& one) { return one.gate_up > points_surely; });
    most_go_together_ = 2 * together > std::ssize(mlps_);
    for (auto& found : parallel_results(mlps_, [&](const MlpSides& sides) { return look_at(sides); })) {
      if (found) faults_.insert(std::move(*found));
    }
    for (auto& found : parallel_results(heads_, [&](const Heads& part) { return look_at(part); })) {
      for (auto& one : found) faults_.insert(std::move(one));
    }
    look_for_turned();
    return std::move(faults_);
  }

 private:
  const Energies* find(const PlannedLinear* linear) const {
    const auto found = linear == nullptr ? energies_.end() : energies_.find(linear->name);
    return found == energies_.end() || found->second.kept.values.empty() ? nullptr : &found->second;
  }

  void fault(const std::string& linear, const std::string& what) { faults_.emplace(linear, what); }

  static std::string by_how_much(double stored, double other, std::string_view reading) {
    return concat(" by ", fixed(stored, 1), " standard errors as stored, by ", fixed(other, 1), " ", reading);
  }

  // ---- gates, ups and downs ----

  std::optional<MlpSides> measure(const Neurons& part) const {
    const Energies *gate = find(part.gate), *up = find(part.up), *down = find(part.down);
    if (gate == nullptr || up == nullptr || down == nullptr) return std::nullopt;
    const std::array<const Energies*, 2> both{gate, up};
    auto readers = readers_of(both);
    MlpSides sides{&part, std::move(readers[0]), std::move(readers[1]), writer_of(*down), 0, 0, 0, {}, {}};
    sides.gate_up = Alignment(sides.gate, sides.up).sigmas(same);
    sides.up_down = Alignment(sides.up, sides.down).sigmas(same);
    sides.gate_down = Alignment(sides.gate, sides.down).sigmas(same);
    sides.of_ups.add(sides.up, sides.down), sides.of_gates.add(sides.gate, sides.down);
    return sides;
  }

  void add(MlpSides sides) {
    auto& [ups, gates] = leans_[{sides.part->layer, sides.part->expert >= 0}];
    ups.add(sides.of_ups), gates.add(sides.of_gates);
    mlps_.push_back(std::move(sides));
  }

  /// The gate or the up, where it has nothing to do with the two others, which go together. Of downs that is not asked: what
  /// they write has to do with the two in some layers and not in others.
  static const PlannedLinear* stranger_of(const MlpSides& sides) {
    const bool gate_up = std::abs(sides.gate_up) < points_elsewhere,
               up_down = std::abs(sides.up_down) < points_elsewhere,
               gate_down = std::abs(sides.gate_down) < points_elsewhere;
    if (gate_up && gate_down && sides.up_down > points_surely) return sides.part->gate;
    if (gate_up && up_down && sides.gate_down > points_surely) return sides.part->up;
    return nullptr;
  }

  std::optional<Misdirected> look_at(const MlpSides& sides) const {
    // Gates and ups read so much alike that they need no third to say that they do not.
    if (std::abs(sides.gate_up) > points_elsewhere) return std::nullopt;
    const PlannedLinear* const stranger = stranger_of(sides);
    const bool is_up = stranger != nullptr && stranger == sides.part->up;
    const auto own = is_up ? &MlpSides::up : &MlpSides::gate, other = is_up ? &MlpSides::gate : &MlpSides::up;
    const auto linear = is_up ? &Neurons::up : &Neurons::gate, partner = is_up ? &Neurons::gate : &Neurons::up;
    const Alignment alignment(sides.*own, sides.*other);
    const auto say = [&](double found, const std::string& reading) -> Misdirected {
      return {
          (sides.part->*linear)->name,
          concat(": its channels point along those of ", printable((sides.part->*partner)->name),
                 by_how_much(sides.gate_up, found, reading), stranger == nullptr ? "; one of the two is wrong" : "")};
    };
    const double least = std::max(points_along, as_clearly * std::abs(sides.gate_up));
    if (const auto order = other_order(alignment, static_cast<size_t>(sides.part->up->n), least)) {
      return say(order->second, std::string(order->first));
    }
    for (const MlpSides* from : elsewhere(sides)) {
      // Layers and experts that were made of each other go with each other's: what was exchanged has lost its own.
      if (std::abs(from->gate_up) > points_elsewhere || alignment.sigmas_of(from->*own, same) < least) continue;
      const double found = Alignment(from->*own, sides.*other).sigmas(same);
      if (found < least) continue;
      return say(found, concat("with those of ", printable((from->part->*linear)->name), " in their place"));
    }
    return std::nullopt;
  }

  static std::optional<std::pair<std::string_view, double>> other_order(const Alignment& alignment, size_t size,
                                                                        double least) {
    std::optional<std::pair<std::string_view, double>> best;
    for (const ChannelOrder& order : channel_orders()) {
      if (size % order.multiple != 0) continue;
      const double found = alignment.sigmas(
          [&](int64_t channel) { return static_cast<int64_t>(order.from(static_cast<size_t>(channel), size)); });
      if (found > (best ? best->second : least)) best = {order.name, found};
    }
    return best;
  }

  /// Those that could stand in the place of these: of all layers or, of experts, of the mixture, and of the same number; of
  /// large mixtures, where hardly any go together, the neighbours alone.
  std::vector<const MlpSides*> elsewhere(const MlpSides& sides) const {
    constexpr size_t most = 64;
    std::vector<const MlpSides*> found, near;
    for (const MlpSides& from : mlps_) {
      if (&from == &sides || !could_be(from, sides)) continue;
      found.push_back(&from);
      if (std::abs(from.part->expert - sides.part->expert) <= 1) near.push_back(&from);
    }
    return found.size() > most && !most_go_together_ ? near : found;
  }

  static bool could_be(const MlpSides& from, const MlpSides& sides) {
    if (from.part->up->n != sides.part->up->n || from.part->up->k != sides.part->up->k) return false;
    if (from.part->expert < 0 || sides.part->expert < 0) return from.part->expert == sides.part->expert;
    return from.part->layer == sides.part->layer || from.part->expert == sides.part->expert;
  }

  /// Gates in the place of ups: whose cosines with downs have a side, and those of ups have none.
  void look_for_turned() {
    std::vector<std::pair<int64_t, bool>> turned, perhaps;
    size_t sound = 0;
    for (const auto& [place, lean] : leans_) {
      const double up = lean.first.sigmas(), gate = lean.second.sigmas();
      if (gate > no_side && up > no_side) return;  // of a gate that something is added to, both have
      if (gate > some_side && up < no_side) perhaps.push_back(place);
      if (gate > one_sided && up < no_side && gate > as_clearly * up) turned.push_back(place);
      sound += up > some_side;
    }
    // What all layers agree in is how an architecture is that is not known.
    if (sound == 0 && (!is_known_ || perhaps.size() < 2)) return;
    if (turned.empty() || (sound > 0 && sound < 2 * turned.size())) return;
    if (sound == 0) turned = perhaps;
    for (const Neurons& part : neurons_) {
      if (std::ranges::find(turned, std::pair(part.layer, part.expert >= 0)) == turned.end() || part.expert > 0)
        continue;
      const auto& [ups, gates] = leans_.at({part.layer, part.expert >= 0});
      fault(part.gate->name,
            concat(": it and ", printable(part.up->name), " are in each other's place: what a gate reads has no side ",
                   "that it writes to, what an up reads has; those lean by ", fixed(gates.sigmas(), 1),
                   " standard errors, these by ", fixed(ups.sigmas(), 1)));
    }
  }

  // ---- queries and keys, values and outputs ----

  std::vector<Misdirected> look_at(const Heads& part) const {
    const Energies *value = find(part.value), *output = find(part.output), *query = find(part.query),
                   *key = find(part.key);
    if (value == nullptr || output == nullptr) return {};
    std::vector<Misdirected> faults;
    const auto keep = [&](std::optional<Misdirected> found) {
      if (found) faults.push_back(std::move(*found));
    };
    std::vector<const Energies*> readers{value};
    for (const Energies* one : {key, query}) {
      if (one != nullptr && one->kept.range.cols == value->kept.range.cols) readers.push_back(one);
    }
    auto pointers = readers_of(readers);
    const Pointers writer = writer_of(*output);
    const InputGroup& reads = *part.reads;
    const auto producer = [&](int64_t channel) { return reads.producer_channel(channel); };
    const HeadShape shape = shape_of(part.output->k, part.value->n);
    const double stored = Alignment(writer, pointers[0]).sigmas(producer);
    if (readers.size() == 3 && part.key->n == part.value->n && part.query->n == part.output->k) {
      const double keys = Alignment(pointers[2], pointers[1]).sigmas(producer);
      keep(exchanged(part, pointers, writer, stored, keys, producer));
      if (!faults.empty()) return faults;
      keep(read_heads(pointers[2], pointers[1], shape, *part.query, *part.key));
    }
    keep(read_heads(writer, pointers[0], shape, *part.output, *part.value));
    return faults;
  }

  HeadShape shape_of(int64_t channels, int64_t kept) const {
    if (head_dim_ <= 0 || channels % head_dim_ != 0 || kept % head_dim_ != 0 || channels % kept != 0) return {};
    return {head_dim_, channels / head_dim_, channels / kept};
  }

  static std::optional<Misdirected> exchanged(const Heads& part, std::span<const Pointers> pointers,
                                              const Pointers& writer, double stored, double keys,
                                              const Partner& producer) {
    if (std::abs(stored) > points_elsewhere || std::abs(keys) > points_elsewhere) return std::nullopt;
    const double as_value = Alignment(writer, pointers[1]).sigmas(producer);
    const double as_key = Alignment(pointers[2], pointers[0]).sigmas(producer);
    if (as_value < points_along || as_key < points_along) return std::nullopt;
    return Misdirected(
        part.key->name,
        concat(": it and ", printable(part.value->name), " are in each other's place: its rows point ", "along what ",
               printable(part.output->name), " reads", by_how_much(stored, as_value, "so")));
  }

  /// A few heads stand where they stood in some other orders: those that do not are asked.
  static std::optional<Misdirected> read_heads(const Pointers& many, const Pointers& few, const HeadShape& shape,
                                               const PlannedLinear& of_many, const PlannedLinear& of_few) {
    if (shape.width == 0) return std::nullopt;
    const Alignment alignment(many, few);
    double best = heads_along, as_stored = 0;
    std::string_view reading;
    for (const HeadReading& one : head_readings) {
      const auto moved = [&](int64_t channel, int64_t to) {
        return own_channel(channel, shape) == one.channel(channel, shape) ? -1 : to;
      };
      const double stored =
          alignment.sigmas([&](int64_t channel) { return moved(channel, own_channel(channel, shape)); });
      if (std::abs(stored) > points_elsewhere) continue;
      const double found =
          alignment.sigmas([&](int64_t channel) { return moved(channel, one.channel(channel, shape)); });
      if (found > best && found > as_clearly * std::abs(stored)) best = found, as_stored = stored, reading = one.name;
    }
    if (reading.empty()) return std::nullopt;
    return Misdirected(of_many.name, concat(": its heads point along those of ", printable(of_few.name),
                                            by_how_much(as_stored, best, reading), "; one of the two is wrong"));
  }

  const std::vector<Neurons> neurons_;
  const std::vector<Heads> heads_;
  const int64_t head_dim_;
  const bool is_known_;  ///< the architecture
  const EnergiesByName& energies_;
  std::vector<MlpSides> mlps_;
  bool most_go_together_ = false;
  std::map<std::pair<int64_t, bool>, std::pair<Leaning, Leaning>>
      leans_;  ///< by layer, experts apart: of ups, of gates
  std::map<std::string, std::string> faults_;
};

}  // namespace

std::map<std::string, KeptRange, std::less<>> values_to_keep(
    const LayerGroups& groups, const std::map<std::string, EnergySample, std::less<>>& samples) {
  constexpr size_t most_of_experts = size_t{1} << 26, neurons = 512, rows_of_heads = 256;
  constexpr size_t expert_channels = 256, expert_neurons = 128, fewest = 16;
  Keeper keeper(samples);
  const auto parts = neurons_of(groups);
  const auto experts = std::ranges::count_if(parts, [](const auto& one) { return one.expert >= 0; });
  const size_t of_expert = most_of_experts / (3 * static_cast<size_t>(std::max<int64_t>(1, experts)));
  const size_t of_stream = std::clamp(of_expert / expert_neurons, 4 * fewest, expert_channels);
  for (const Neurons& part : parts) {
    const bool expert = part.expert >= 0;
    keeper.keep(part, expert ? of_stream : channels_of(*part.down),
                expert ? std::clamp(of_expert / of_stream, fewest, expert_neurons) : neurons);
  }
  for (const Heads& part : heads_of(groups)) keeper.keep(part, channels_of(*part.output), rows_of_heads);
  return std::move(keeper).kept();
}

std::map<std::string, std::string> misdirected(const model::OpenedModel& model, const LayerGroups& groups,
                                               const EnergiesByName& energies) {
  return DirectionCheck(groups, model.config.head_dim, model.config.architecture != nullptr, energies).run();
}

}  // namespace w4q::verify
