#include "verify/statistics/statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <memory>
#include <set>
#include <string>

#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/digest.h"
#include "model/kinds.h"
#include "model/layer_plan.h"
#include "model/parameters.h"
#include "verify/rungs.h"
#include "verify/statistics/delta.h"
#include "verify/statistics/directions.h"
#include "verify/statistics/exchanged.h"
#include "verify/statistics/norms.h"
#include "verify/statistics/repeated_parts.h"
#include "verify/statistics/stacks.h"
#include "verify/statistics/unlearnt.h"
#include "verify/survey.h"

namespace w4q::verify {

/// Planes and norms that hold the bytes of another's.
class Twins {
 public:
  /// Empty: nothing that could not be the same by chance.
  static std::string digest_of(std::span<const std::byte> bytes) {
    return says_something(bytes) ? io::digest_of(bytes).text() : std::string();
  }

  void add(const std::string& subject, const std::string& what, const std::string& digest) {
    if (digest.empty()) return;
    const auto [first, is_new] = seen_.try_emplace(concat(what, digest), subject);
    if (!is_new) found_.push_back({first->second, subject, what});
  }

  /// Models are also made by repeating layers or experts, but for what writes, which is zero or trained at first: those are
  /// named, and proven to be nothing wrong.
  void report(const model::OpenedModel& model, StatisticsReport& report) const {
    using model::LayerNumbers;
    std::map<LayerNumbers, size_t> packed;
    for (const auto& [name, info] : model.folder.quantization.linears) ++packed[model::layer_numbers(name)];
    std::map<int64_t, size_t> experts;  // of a layer
    for (const auto& [place, count] : packed) experts[place.layer] += place.expert >= 0;
    std::map<std::pair<LayerNumbers, LayerNumbers>, size_t> linears;
    const auto places = [](const Twin& twin) {
      return std::pair(model::layer_numbers(twin.first), model::layer_numbers(twin.second));
    };
    for (const Twin& twin : found_) linears[places(twin)] += twin.what == "codes";
    std::map<int64_t, size_t> repeated_experts;
    for (const auto& [between, count] : linears) {
      const auto& [first, second] = between;
      if (second.expert >= 0 && first != second && count == packed[second]) ++repeated_experts[second.layer];
    }
    // A mixture that was made of one MLP has the same expert throughout; one alone stands in another's place.
    const auto lone = [&](const LayerNumbers& place) {
      return place.expert >= 0 && 2 * repeated_experts[place.layer] < experts[place.layer];
    };
    const std::string part = lone_part_of(model);
    for (const Twin& twin : found_) {
      const auto between = places(twin);
      const bool repeated =
          between.first != between.second && 2 * linears[between] > packed[between.second] && !lone(between.second);
      const std::string text = concat(printable(twin.second), ": its ", twin.what, " are those of ",
                                      printable(twin.first), ", byte for byte");
      const bool alone = !part.empty() && twin.what == "codes" && part_in_layer(twin.second) == part;
      if ((repeated && !alone) || between.first.layer < 0) {
        report.warnings.push_back(text);
      } else {
        report.faults.push_back(text);
      }
    }
  }

 private:
  struct Twin {
    std::string first, second, what;
  };

  /// The part of a layer that alone is another's, of linears; empty: none.
  std::string lone_part_of(const model::OpenedModel& model) const {
    std::vector<Repeated> repeated;
    std::vector<std::string> linears;
    for (const Twin& twin : found_) {
      if (twin.what == "codes") repeated.push_back({twin.second, twin.first});
    }
    for (const auto& [name, info] : model.folder.quantization.linears) linears.push_back(name);
    return lone_part(repeated, linears);
  }

  /// Whether two could not be the same by chance, nor because there is nothing in them.
  static bool says_something(std::span<const std::byte> bytes) {
    std::array<bool, 256> seen{};
    int different = 0;
    if (bytes.size() < 256) return false;
    for (const std::byte byte : bytes) {
      bool& known = seen[std::to_integer<size_t>(byte)];
      different += !known, known = true;
      if (different == 16) return true;
    }
    return false;
  }

  std::map<std::string, std::string> seen_;
  std::vector<Twin> found_;
};

namespace {

void relate(const model::OpenedModel& candidate, const LayerGroups& groups,
            const std::map<std::string, Energies, std::less<>>& energies, StatisticsReport& report) {
  RowOrders orders = row_orders(candidate);
  if (candidate.config.architecture == nullptr) orders.in_turn = gates_take_turns(groups, energies);
  report.energy = check_energies(groups, orders, energies);
  for (const auto& [name, what] : misplaced_experts(candidate, groups, orders, energies))
    report.faults.push_back(concat(printable(name), what));
  report.faults.insert(report.faults.end(), report.energy.faults.begin(), report.energy.faults.end());
  report.warnings.insert(report.warnings.end(), report.energy.warnings.begin(), report.energy.warnings.end());
  auto profiles = check_profiles(groups, energies, norm_sizes(candidate, groups));
  report.places = std::move(profiles.places);
  for (const auto& [name, what] : profiles.faults) report.faults.push_back(concat(printable(name), ": ", what));
  for (const auto& [name, what] : profiles.warnings) report.warnings.push_back(concat(printable(name), ": ", what));
}

/// What is kept of a linear's values.
const KeptRange& kept_of(const std::map<std::string, KeptRange, std::less<>>& kept, std::string_view linear) {
  static const KeptRange nothing;
  const auto found = kept.find(linear);
  return found == kept.end() ? nothing : found->second;
}

/// Of linears that are stored, or decoded as they are loaded, as matrices; not of those that are packed in other layers:
/// scales that were folded there change what is alike in all layers.
void add_plain(const model::OpenedModel& model, const std::map<std::string, EnergySample, std::less<>>& samples,
               const std::map<std::string, KeptRange, std::less<>>& kept,
               std::map<std::string, Energies, std::less<>>& energies) {
  const io::Checkpoint& tensors = model.folder.tensors;
  std::set<std::string, std::less<>> packed;
  for (const auto& [name, info] : model.folder.quantization.linears) packed.insert(model::kind_of(name));
  for (const auto& parameter : model::parameters(model)) {
    if (packed.contains(model::kind_of(parameter.name))) continue;
    const auto sample = samples.find(model::module_path(parameter.name));
    if (sample == samples.end() || !parameter.linear || !tensors.contains(parameter.name)) continue;
    const io::TensorInfo& info = tensors.at(parameter.name);
    if (info.shape.size() != 2 || info.shape != parameter.shape || energies.contains(sample->first)) continue;
    energies.emplace(sample->first, energies_of(info.shape[0], info.shape[1], tensors.rows(parameter.name),
                                                sample->second, kept_of(kept, sample->first)));
  }
}

/// Of what reads each norm.
ReaderColumns reader_columns(const LayerGroups& groups, const std::map<std::string, Energies, std::less<>>& energies) {
  ReaderColumns columns;
  for (const auto& layer : groups) {
    for (const auto& group : layer) {
      if (!group.norm || group.linears.empty()) continue;
      auto& measured = columns[group.norm->name + ".weight"];
      const auto found = energies.find(group.linears.front().name);
      if (found == energies.end() || found->second.rows_taken.empty() || !measured.empty()) continue;
      const double rows = std::log(static_cast<double>(found->second.rows_taken.size()));
      for (const double column : found->second.cols) measured.push_back((column - rows) / 2);
    }
  }
  return columns;
}

}  // namespace

struct StatisticsCollector::State {
  const model::OpenedModel& candidate;
  LayerGroups groups = {};
  std::map<std::string, EnergySample, std::less<>> samples = {};
  std::map<std::string, KeptRange, std::less<>> kept = {};
  StatisticsReport report = {};
  std::map<std::string, Energies, std::less<>> energies = {};
  Twins twins = {};
};

StatisticsCollector::StatisticsCollector(const model::OpenedModel& candidate)
    : state_(new State{candidate, related_groups(candidate)}) {
  state_->samples = energy_samples(state_->groups);
  state_->kept = values_to_keep(state_->groups, state_->samples);
}
StatisticsCollector::~StatisticsCollector() = default;
StatisticsCollector::StatisticsCollector(StatisticsCollector&&) noexcept = default;

MeasuredLinear StatisticsCollector::measure(const checkpoint::PackedLinearInfo& info,
                                            std::shared_ptr<const formats::PackedLinear> packed) const {
  const std::string& name = info.name;
  MeasuredLinear measured;
  measured.name = name;
  for (size_t pass = 0; pass < packed->passes.size(); ++pass) {
    for (const auto role : {formats::PlaneRole::codes, formats::PlaneRole::scales}) {
      measured.planes.push_back({concat(to_string(role), pass == 0 ? "" : concat(" of pass ", pass)),
                                 Twins::digest_of(packed->passes[pass].plane(role).bytes.bytes())});
    }
    // A further pass holds what the one before left: it is compared with its like. Orders of groups are no scheme.
    formats::Scheme scheme = packed->passes[pass].scheme;
    scheme.act_order = false;
    measured.passes.push_back({name, concat(formats::to_string(scheme), " ", pass), name.substr(name.rfind('.') + 1),
                               figures_of(packed->passes[pass])});
  }
  if (const auto sample = state_->samples.find(name); sample != state_->samples.end()) {
    measured.energies =
        energies_of({name, info.n, info.k, std::move(packed), {}}, sample->second, kept_of(state_->kept, name));
  }
  return measured;
}

void StatisticsCollector::add(MeasuredLinear measured) {
  for (const auto& [what, digest] : measured.planes) state_->twins.add(measured.name, what, digest);
  for (auto& pass : measured.passes) state_->report.passes.push_back(std::move(pass));
  if (measured.energies) state_->energies.emplace(measured.name, std::move(*measured.energies));
}

StatisticsReport StatisticsCollector::report() {
  StatisticsReport report = std::move(state_->report);
  const model::OpenedModel& candidate = state_->candidate;
  state_->twins.report(candidate, report);
  const auto exchanged = exchanged_scales(candidate.folder, report.passes);
  for (const auto& [name, what] : exchanged) report.faults.push_back(concat(printable(name), ": ", what));
  for (auto& fault : block_faults(report.passes)) {
    // Whose the scales are says more than that they are not those of its codes.
    if (!exchanged.contains(fault.substr(0, fault.find(": ")))) report.faults.push_back(std::move(fault));
  }
  add_plain(candidate, state_->samples, state_->kept, state_->energies);
  relate(candidate, state_->groups, state_->energies, report);
  for (const auto& [name, what] : misdirected(candidate, state_->groups, state_->energies))
    report.faults.push_back(concat(printable(name), what));
  for (auto& fault : unlearnt_faults(candidate, state_->groups, report.energy, state_->energies))
    report.faults.push_back(std::move(fault));
  for (auto& fault : delta_faults(candidate, state_->energies)) report.faults.push_back(std::move(fault));
  auto norms = check_norms(candidate, reader_columns(state_->groups, state_->energies));
  std::ranges::move(norms.faults, std::back_inserter(report.faults));
  std::ranges::move(norms.warnings, std::back_inserter(report.warnings));
  return report;
}

StatisticsReport check_statistics(const model::OpenedModel& candidate) {
  StatisticsCollector collector(candidate);
  const auto& linears = candidate.folder.quantization.linears;
  Progress progress("statistics", static_cast<int64_t>(linears.size()), "tensors");
  for (const auto& [name, info] : linears) {
    collector.add(collector.measure(info, std::make_shared<const formats::PackedLinear>(
                                              checkpoint::load_canonical(candidate.folder.tensors, info))));
    progress.advance(1);
  }
  return collector.report();
}

io::Json to_json(const StatisticsReport& report) {
  io::Json passes = io::Json::array(), relations = io::Json::array();
  for (const auto& [name, scheme, role, figures] : report.passes) {
    passes.push_back({{"name", name},
                      {"scheme", scheme},
                      {"match", figures.match.value},
                      {"match_error", figures.match.error},
                      {"reordered", figures.reordered.match.value},
                      {"norm_spread", figures.spread.stored},
                      {"norm_spread_mixed", figures.spread.mixed},
                      {"zeros", figures.zeros.value},
                      {"zeros_error", figures.zeros.error}});
  }
  for (const auto& relation : report.energy.relations) {
    relations.push_back({{"layer", relation.layer},
                         {"kind", relation.kind},
                         {"agreement", relation.found.value},
                         {"sigmas", relation.found.sigmas()}});
  }
  io::Json places = io::Json::array();
  for (const Place& place : report.places) {
    places.push_back(
        {{"name", place.linear}, {"side", place.side}, {"sigmas", place.sigmas}, {"others", place.others}});
  }
  return {{"places", std::move(places)},
          {"passes", std::move(passes)},
          {"relations", std::move(relations)},
          {"warnings", report.warnings}};
}

namespace {

/// Of every rule the weight that is nearest to its limit.
std::vector<Verdict> verdicts_of(const StatisticsReport& report) {
  std::map<std::string, Verdict> nearest;
  const auto hold = [&](const std::string& rule, const std::string& name, double value, double limit) {
    const Verdict verdict{concat(rule, " of ", name), value, limit, true};
    const auto [at, is_new] = nearest.try_emplace(rule, verdict);
    if (!is_new && verdict.value < at->second.value) at->second = verdict;
  };
  for (const BlockSubject& pass : report.passes) {
    const auto& [slope, error] = pass.figures.match;
    if (error > 0) hold("scales over codes", pass.name, slope + 5 * error, least_scale_match);
    const auto& zeros = pass.figures.zeros;
    if (zeros.error > 0)
      hold("mean codes over zero points", pass.name, zeros.value + 5 * zeros.error, least_zero_match);
  }
  std::vector<Verdict> verdicts;
  for (auto& [rule, verdict] : nearest) verdicts.push_back(std::move(verdict));
  return verdicts;
}

/// Where nothing is packed there are no codes to relate: said only where something is wrong.
void check_plain(CheckContext& context, Findings& findings) {
  const model::OpenedModel candidate = model::take_apart(context.candidate());
  auto faults = StatisticsCollector(candidate).report().faults;
  if (faults.empty()) return;
  const auto count = faults.size();
  findings.checks.add(
      {"statistics", false, concat(count, " tensors are as no other of their kind"), std::move(faults)});
}

}  // namespace

CheckRow statistics_check() {
  return {.name = "statistics",
          .help = "codes, scales and energies are related as those of sound weights are",
          .run = [](CheckContext& context, Findings& findings) {
            if (context.candidate().folder.quantization.linears.empty()) return check_plain(context, findings);
            auto* const survey = context.survey();
            const auto report = survey != nullptr ? survey->statistics.report() : check_statistics(context.candidate());
            findings.json["statistics"] = to_json(report);
            for (const auto& warning : report.warnings) findings.note(warning);
            Check check{"statistics", report.faults.empty(), {}, report.faults};
            check.detail =
                concat(report.passes.size() - std::min(report.passes.size(), report.faults.size()), " of ",
                       report.passes.size(), " packed weights agree with themselves and with those around them");
            check.verdicts = verdicts_of(report);
            findings.checks.add(std::move(check));
          }};
}

}  // namespace w4q::verify
