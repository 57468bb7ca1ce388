#include "verify/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/progress.h"
#include "core/text.h"
#include "kernels/linear/linear.h"
#include "model/experts_like.h"
#include "model/layer_stage.h"
#include "model/stored_sizes.h"
#include "verify/weights/rescaled.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

constexpr int64_t rows_at_once = 64;

void check_same_model(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  const auto &found = candidate.config, &wanted = base.config;
  if (found.architecture == wanted.architecture && found.layers == wanted.layers &&
      found.hidden_size == wanted.hidden_size && found.intermediate_size == wanted.intermediate_size &&
      found.vocab_size == wanted.vocab_size) {
    return;
  }
  throw Error(ErrorCode::mismatch, concat(candidate.folder.path.string(), ": is not a version of the base model"))
      .detail(concat("expected ", wanted.architecture_name, " with ", wanted.layers, " layers of ", wanted.hidden_size,
                     ", found ", found.architecture_name, " with ", found.layers, " of ", found.hidden_size));
}

/// One of the two checkpoints.
class Side {
 public:
  Side(const model::OpenedModel& candidate, const model::OpenedModel& base)
      : folder_(candidate.folder),
        base_(model::untied_like(model::experts_like(model::fold_like(base, candidate.folded), candidate),
                                 candidate.folder.tensors)),
        weights_(candidate, base_) {
    check_same_model(candidate, base);
  }

  /// In the basis of the checkpoint.
  const checkpoint::Folder& base() const noexcept { return base_.folder; }

  std::string scheme(const std::string& module) const {
    const auto* info = folder_.quantization.find(module);
    if (info == nullptr) return std::string(dtype_name(folder_.tensors.at(module + ".weight").dtype));
    return scheme_text(*info);
  }

  /// But for the scheme.
  ComparedSide linear(const std::string& module, const OutputErrorOf& output_error) {
    ComparedSide result;
    const auto reference = stored_weight(base_.folder, module);
    const auto weight = weights_.effective(module);
    result.error = model::compare_weights(reference, weight);
    if (output_error) result.output = output(module, reference, weight, output_error);
    return result;
  }

  ComparedTotal total(const std::vector<ComparedLinear>& linears, ComparedSide ComparedLinear::*side) const {
    ComparedTotal result;
    for (const auto& [name, info] : folder_.tensors.tensors()) result.bytes += static_cast<int64_t>(info.size());
    double bytes = 0, weights = 0;
    for (const auto& linear : linears) {
      result.error.add((linear.*side).error);
      bytes += bytes_of_linear(linear.name);
      weights += static_cast<double>(element_count(base_.folder.tensors.at(linear.name + ".weight").shape));
    }
    result.bits_per_weight = weights == 0 ? 0 : 8 * bytes / weights;
    result.kinds = bytes_by_kind(folder_);
    return result;
  }

 private:
  double bytes_of_linear(const std::string& module) const {
    const auto* info = folder_.quantization.find(module);
    if (info == nullptr) return static_cast<double>(folder_.tensors.at(module + ".weight").size());
    double sum = 0;
    for (const auto& plane : checkpoint::planned_planes(*info)) sum += static_cast<double>(plane.size());
    return sum;
  }

  static std::optional<double> output(const std::string& module, const kernels::LinearWeight& reference,
                                      const kernels::LinearWeight& weight, const OutputErrorOf& output_error) {
    double sum = 0;
    for (int64_t row = 0; row < reference.n; row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, reference.n - row);
      std::vector<float> expected(static_cast<size_t>(rows * reference.k)), found(expected.size());
      const MatrixView<float> difference(expected.data(), rows, reference.k);
      kernels::decode_rows(reference, row, row + rows, difference);
      kernels::decode_rows(weight, row, row + rows, {found.data(), rows, reference.k});
      for (size_t i = 0; i < expected.size(); ++i) expected[i] -= found[i];
      const auto part = output_error(module, difference);
      if (!part) return std::nullopt;
      sum += *part;
    }
    return sum;
  }

  const checkpoint::Folder& folder_;
  const model::OpenedModel base_;
  RescaledWeights weights_;
};

std::optional<double> output_power(const checkpoint::Folder& base, const std::string& module,
                                   const OutputErrorOf& output_error) {
  if (!output_error) return std::nullopt;
  const auto weight = stored_weight(base, module);
  double sum = 0;
  for (int64_t row = 0; row < weight.n; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, weight.n - row);
    std::vector<float> values(static_cast<size_t>(rows * weight.k));
    const MatrixView<float> matrix(values.data(), rows, weight.k);
    kernels::decode_rows(weight, row, row + rows, matrix);
    const auto part = output_error(module, matrix);
    if (!part) return std::nullopt;
    sum += *part;
  }
  return sum;
}

/// How far an error lies below the outputs; empty where that is not known.
std::string decibels(const std::optional<double>& power, const std::optional<double>& error) {
  return power && error ? fixed(10 * std::log10(*power / *error), 2) : "";
}

/// "0.0123 ± 0.0010", half a 95 % interval.
std::string interval(double value, double error, int digits) {
  return std::isnan(error) ? fixed(value, digits)
                           : concat(fixed(value, digits), " ± ", fixed(confidence * error, digits));
}

std::string predictions_text(const Comparison::Predictions& predictions) {
  const auto &a = predictions.a, &b = predictions.b;
  TextTable table({"measure, 95 % interval", "A", "B", "B − A"});
  const double ratio = std::exp(predictions.nll_difference.mean);
  table.row({"perplexity", interval(a.perplexity(), a.perplexity_error(), 4),
             interval(b.perplexity(), b.perplexity_error(), 4),
             concat("× ", interval(ratio, ratio * predictions.nll_difference.error, 4))});
  table.row(
      {"ratio to the base's", interval(a.ratio(), a.ratio_error(), 4), interval(b.ratio(), b.ratio_error(), 4), ""});
  table.row({"KL to the base", interval(a.base->kl.mean, a.base->kl.error, 5),
             interval(b.base->kl.mean, b.base->kl.error, 5),
             interval(predictions.kl_difference.mean, predictions.kl_difference.error, 5)});
  for (size_t i = 0; i < a.base->kl_quantiles.size(); ++i) {
    const auto &of_a = a.base->kl_quantiles[i], &of_b = b.base->kl_quantiles[i];
    table.row({quantile_name(of_a), quantile_text(of_a), quantile_text(of_b), fixed(of_b.kl - of_a.kl, 5)});
  }
  table.row({"largest KL of one token", fixed(a.base->kl_max, 4), fixed(b.base->kl_max, 4),
             fixed(b.base->kl_max - a.base->kl_max, 4)});
  const auto changed = [](const Estimate& share) { return interval(100 * share.mean, 100 * share.error, 2); };
  table.row({"other most likely token, %", changed(a.base->top1_changed), changed(b.base->top1_changed),
             changed(predictions.top1_difference)});
  const int found = verdict(predictions);
  const char* words = found < 0   ? "B is closer to the base"
                      : found > 0 ? "A is closer to the base"
                                  : "no difference beyond chance";
  return table.str() +
         concat("over ", a.windows, " windows; base perplexity ", fixed(a.base_perplexity(), 4), "\n", words, "\n");
}

io::Json side_json(const ComparedSide& side) {
  io::Json json = {{"scheme", side.scheme},
                   {"sqnr_db", side.error.sqnr()},
                   {"relative_error", side.error.relative()},
                   {"max_error", side.error.max_error}};
  if (side.output) json["output_error"] = *side.output;
  return json;
}

io::Json total_json(const ComparedTotal& total) {
  return {{"bytes", total.bytes},
          {"bits_per_weight", total.bits_per_weight},
          {"sqnr_db", total.error.sqnr()},
          {"relative_error", total.error.relative()},
          {"kinds", to_json(total.kinds)}};
}

io::Json estimate_json(const Estimate& estimate) {
  return {{"mean", estimate.mean},
          {"error", estimate.error},
          {"low", estimate.mean - confidence * estimate.error},
          {"high", estimate.mean + confidence * estimate.error}};
}

/// Tied heads are alike, and so is what scales were folded into; what is missing is for others to say.
bool is_stored_alike(const checkpoint::Folder& side, const checkpoint::Folder& base, const std::string& name) {
  if (!side.tensors.contains(name) || !base.tensors.contains(name)) return true;
  if (side.quantization.rescaled.contains(name)) return true;
  const auto ours = side.tensors.load(name), theirs = base.tensors.load(name);
  return ours->dtype == theirs->dtype && std::ranges::equal(ours->bytes, theirs->bytes);
}

/// Of a row of things of these costs those that this rank looks at: neighbours, which read the same files and statistics.
model::LayerRange part_of(const ranks::Ranks& ranks, const std::vector<int64_t>& costs) {
  const auto parts = std::min(costs.size(), static_cast<size_t>(ranks.size()));
  const auto rank = static_cast<size_t>(ranks.rank());
  return rank < parts ? model::cut_layers(costs, static_cast<int>(parts))[rank] : model::LayerRange{};
}

/// What each rank has found of its part, one behind the other.
std::string gathered(ranks::Ranks& ranks, std::string own) {
  std::string all;
  for (const auto& part : ranks.gather_everywhere(std::move(own))) all += part;
  return all;
}

using Folders = std::array<const checkpoint::Folder*, 2>;

/// Those that either side has packed, or holds otherwise than the base: decoded ones have other types or values.
std::set<std::string> differing_linears(const Folders& sides, const Folders& bases, const model::ModelConfig& config,
                                        ranks::Ranks& ranks) {
  std::set<std::string> names;
  std::vector<std::string> unpacked;  // by both
  std::vector<int64_t> costs;
  for (const auto& parameter : model::parameters(config)) {
    if (!parameter.linear) continue;
    const std::string module(model::module_path(parameter.name));
    if (std::ranges::any_of(sides, [&](const auto* side) { return side->quantization.find(module) != nullptr; })) {
      names.insert(module);
      continue;
    }
    unpacked.push_back(parameter.name);
    const bool stored = bases.front()->tensors.contains(parameter.name);
    costs.push_back(stored ? static_cast<int64_t>(bases.front()->tensors.at(parameter.name).size()) : 0);
  }
  const auto part = part_of(ranks, costs);
  std::string differ;
  for (int64_t i = part.first; i < part.end; ++i) {
    check_interrupt();
    const auto& name = unpacked[static_cast<size_t>(i)];
    const bool alike = is_stored_alike(*sides[0], *bases[0], name) && is_stored_alike(*sides[1], *bases[1], name);
    differ += alike ? 'n' : 'y';
  }
  differ = gathered(ranks, std::move(differ));
  for (size_t i = 0; i < unpacked.size(); ++i) {
    if (differ[i] == 'y') names.emplace(model::module_path(unpacked[i]));
  }
  return names;
}

/// What is measured of a linear, as it travels between ranks, which are all of one kind.
struct LinearFigures {
  std::optional<double> power, output_a, output_b;
  model::WeightError error_a, error_b;
};
static_assert(std::is_trivially_copyable_v<LinearFigures>);

}  // namespace

Comparison compare_linears(const model::OpenedModel& a, const model::OpenedModel& b, const model::OpenedModel& base,
                           const OutputErrorOf& output_error, ranks::Ranks& ranks) {
  Side side_a(a, base), side_b(b, base);
  const auto differing =
      differing_linears({&a.folder, &b.folder}, {&side_a.base(), &side_b.base()}, base.config, ranks);
  const std::vector<std::string> names(differing.begin(), differing.end());
  std::vector<int64_t> weights;
  for (const auto& name : names) weights.push_back(element_count(side_a.base().tensors.at(name + ".weight").shape));
  const auto part = part_of(ranks, weights);
  Progress progress("compare", part.count(), "tensors");
  std::string found;
  for (int64_t i = part.first; i < part.end; ++i) {
    const auto& name = names[static_cast<size_t>(i)];
    const auto power = output_power(side_a.base(), name, output_error);
    const auto of_a = side_a.linear(name, output_error), of_b = side_b.linear(name, output_error);
    const LinearFigures figures{power, of_a.output, of_b.output, of_a.error, of_b.error};
    found.append(reinterpret_cast<const char*>(&figures), sizeof figures);
    progress.advance(1);
  }
  found = gathered(ranks, std::move(found));
  ensure(found.size() == names.size() * sizeof(LinearFigures), "the ranks differ in which linears they compare");
  Comparison result;
  for (size_t i = 0; i < names.size(); ++i) {
    LinearFigures figures;
    std::memcpy(&figures, found.data() + i * sizeof figures, sizeof figures);
    result.linears.push_back({names[i],
                              figures.power,
                              {side_a.scheme(names[i]), figures.error_a, figures.output_a},
                              {side_b.scheme(names[i]), figures.error_b, figures.output_b}});
  }
  result.a = side_a.total(result.linears, &ComparedLinear::a);
  result.b = side_b.total(result.linears, &ComparedLinear::b);
  return result;
}

Comparison::Predictions compare_predictions(const model::Model& a, const model::Model& b, const model::Model& base,
                                            std::span<const int32_t> ids, const PerplexityOptions& options) {
  const model::Model* const candidates[] = {&a, &b};
  const BaseModel one{&base, options.base_kv.value_or(kernels::KvChoice{})};
  auto reports = measure_perplexities(candidates, {&one, 1}, ids, options);
  Comparison::Predictions result{std::move(reports[0]), std::move(reports[1]), {}, {}, {}};
  struct Pair {
    int64_t scored;
    double nll, kl, top1_changed;
  };
  std::vector<Pair> pairs;
  for (size_t i = 0; i < result.a.per_window.size(); ++i) {
    const auto &from = result.a.per_window[i], &to = result.b.per_window[i];
    pairs.push_back(
        {from.scored, to.nll - from.nll, to.kl - from.kl, static_cast<double>(to.top1_changed - from.top1_changed)});
  }
  result.nll_difference = estimate(pairs, [](const Pair& pair) { return pair.nll; });
  result.kl_difference = estimate(pairs, [](const Pair& pair) { return pair.kl; });
  result.top1_difference = estimate(pairs, [](const Pair& pair) { return pair.top1_changed; });
  return result;
}

int verdict(const Comparison::Predictions& predictions) noexcept {
  const auto& kl = predictions.kl_difference;
  // A model that predicts nothing is no better than another by chance.
  if (!std::isfinite(predictions.b.nll.mean)) return std::isfinite(predictions.a.nll.mean) ? 1 : 0;
  if (!std::isfinite(predictions.a.nll.mean)) return -1;
  if (!(std::abs(kl.mean) > confidence * kl.error)) return 0;
  return kl.mean < 0 ? -1 : 1;
}

namespace {

std::vector<std::string> with_outputs(std::vector<std::string> cells, bool outputs, std::string a, std::string b) {
  if (outputs) cells.insert(cells.end(), {std::move(a), std::move(b)});
  return cells;
}

/// The worse side of a linear.
double least_sqnr(const ComparedLinear& linear) { return std::min(linear.a.error.sqnr(), linear.b.error.sqnr()); }

std::string linears_text(const Comparison& comparison, bool outputs, model::Detail detail) {
  TextTable table(with_outputs({"weight", "A", "B", "SQNR dB, A", "B"}, outputs, "output dB, A", "B"));
  for (const ComparedLinear* linear : model::named_rows(comparison.linears, detail, least_sqnr)) {
    const auto &a = linear->a, &b = linear->b;
    table.row(
        with_outputs({printable(linear->name), a.scheme, b.scheme, fixed(a.error.sqnr(), 2), fixed(b.error.sqnr(), 2)},
                     outputs, decibels(linear->power, a.output), decibels(linear->power, b.output)));
  }
  return table.str();
}

/// One side of the linears of a kind.
struct KindSide {
  std::set<std::string> schemes;
  model::WeightError error;
  double worst = INFINITY;
  std::optional<double> output;

  void add(const ComparedSide& side) {
    schemes.insert(side.scheme);
    error.add(side.error);
    worst = std::min(worst, side.error.sqnr());
    if (side.output) output = output.value_or(0) + *side.output;
  }
};

std::string kinds_text(const Comparison& comparison, bool outputs) {
  TextTable table(
      with_outputs({"linear", "count", "A", "B", "SQNR dB, A", "worst", "B", "worst"}, outputs, "output dB, A", "B"));
  for (const auto& kind : model::by_kind(comparison.linears)) {
    KindSide a, b;
    std::optional<double> power;
    for (const ComparedLinear* linear : kind.rows) {
      a.add(linear->a);
      b.add(linear->b);
      if (linear->power) power = power.value_or(0) + *linear->power;
    }
    table.row(with_outputs(
        {printable(kind.name), concat(kind.rows.size()), model::words_text(a.schemes), model::words_text(b.schemes),
         fixed(a.error.sqnr(), 2), fixed(a.worst, 2), fixed(b.error.sqnr(), 2), fixed(b.worst, 2)},
        outputs, decibels(power, a.output), decibels(power, b.output)));
  }
  return table.str();
}

}  // namespace

std::string to_text(const Comparison& comparison, model::Detail detail) {
  const bool outputs =
      std::ranges::any_of(comparison.linears, [](const auto& linear) { return linear.power.has_value(); });
  const bool all = model::names_all(detail, comparison.linears.size());
  std::string text = all ? "" : concat(kinds_text(comparison, outputs), "\nthe worst of them (--verbose: all)\n");
  text += linears_text(comparison, outputs, detail);
  const auto total = [&](const char* name, const ComparedTotal& side) {
    if (comparison.linears.empty()) {
      text += concat(name, ": every weight is the base's; ", human_bytes(side.bytes), " in all\n");
      return;
    }
    text += concat(name, ": ", fixed(side.bits_per_weight, 3), " bits per weight, SQNR ", fixed(side.error.sqnr(), 2),
                   " dB; ", human_bytes(side.bytes), " in all\n");
  };
  text += "\n";
  total("A", comparison.a);
  total("B", comparison.b);
  if (comparison.predictions) text += "\n" + predictions_text(*comparison.predictions);
  return text;
}

io::Json to_json(const Comparison& comparison) {
  io::Json linears = io::Json::array();
  for (const auto& linear : comparison.linears) {
    io::Json row = {{"name", linear.name}, {"a", side_json(linear.a)}, {"b", side_json(linear.b)}};
    if (linear.power) row["output_power"] = *linear.power;
    linears.push_back(std::move(row));
  }
  io::Json json = {{"linears", std::move(linears)}, {"a", total_json(comparison.a)}, {"b", total_json(comparison.b)}};
  if (!comparison.predictions) return json;
  const auto& predictions = *comparison.predictions;
  json["a"]["perplexity"] = to_json(predictions.a);
  json["b"]["perplexity"] = to_json(predictions.b);
  json["nll_difference"] = estimate_json(predictions.nll_difference);
  json["kl_difference"] = estimate_json(predictions.kl_difference);
  json["top1_difference"] = estimate_json(predictions.top1_difference);
  json["verdict"] = verdict(predictions);
  return json;
}

}  // namespace w4q::verify
