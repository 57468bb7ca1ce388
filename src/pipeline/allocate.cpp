#include "pipeline/allocate.h"

#include <algorithm>
#include <set>

#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "io/output.h"
#include "model/model.h"
#include "model/weight_error.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/mix_search.h"
#include "pipeline/recipe_file.h"
#include "pipeline/select_tensors.h"
#include "pipeline/shared_output.h"
#include "pipeline/shared_partial.h"
#include "pipeline/statistics_file.h"
#include "quantize/allocation.h"
#include "quantize/rounding.h"
#include "ranks/exchange.h"

namespace w4q::pipeline {
namespace {

using formats::PlaneRole;
using formats::Scheme;
using Choices = std::vector<size_t>;

constexpr int kept_bits = 16;
constexpr double frontier_step = 0.25;  // bits per weight

/// One linear whose width is to be chosen.
struct Item {
  std::string tensor, module;
  int64_t weights = 0;
  std::vector<Scheme> schemes;                      ///< without 16 bit, which is the last choice
  std::vector<int64_t> tables;                      ///< bytes of the codebook of each choice
  std::vector<quantize::AllocationChoice> choices;  ///< sizes without codebooks

  int bits(size_t choice) const { return choice < schemes.size() ? schemes[choice].bits : kept_bits; }
};

/// The widths of a scheme that the target leaves to choose from.
std::vector<Scheme> widths_of(const Scheme& scheme, const AllocationTarget& target) {
  auto all = pipeline::widths_of(scheme);
  const auto is_left_out = [&](const Scheme& one) {
    return std::ranges::find(target.widths, one.bits) == target.widths.end();
  };
  if (!target.widths.empty()) std::erase_if(all, is_left_out);
  return all;
}

Item make_item(const TensorPlan& tensor, bool input_scale, const AllocationTarget& target) {
  Item item{tensor.name,
            std::string(model::module_path(tensor.name)),
            tensor.weights(),
            widths_of(*tensor.scheme, target),
            {},
            {}};
  for (const Scheme& scheme : item.schemes) {
    const checkpoint::PackedLinearInfo info{item.module,  tensor.shape[0],           tensor.shape[1],
                                            tensor.dtype, {{scheme, tensor.layout}}, input_scale};
    quantize::AllocationChoice choice;
    item.tables.push_back(0);
    const std::string table = checkpoint::plane_name(item.module, 0, PlaneRole::codebook);
    for (const auto& plane : checkpoint::planned_planes(info)) {
      (plane.name == table ? item.tables.back() : choice.bytes) += plane.size();
    }
    item.choices.push_back(choice);
  }
  item.tables.push_back(0);
  item.choices.push_back({tensor.bytes_before, 0.0});
  return item;
}

/// Statistics and what else is made on the way stand beside the output.
std::filesystem::path beside(const QuantizeRequest& request) {
  return request.output.empty() ? std::filesystem::temp_directory_path() / "w4q" : request.output;
}

class Job {
 public:
  Job(const model::OpenedModel& source, const QuantizeRequest& request)
      : source_(source),
        config_(source.config),
        request_(request),
        ranks_(*request.sharing.ranks),
        plan_(select_tensors(source, request)) {
    if (!request.calibrated && decoded()) {
      throw Error(ErrorCode::bad_argument, "choosing bits needs calibration: it goes by what the model predicts")
          .hint("--calib FILE or --stats FILE, with steps such as --quality good");
    }
    if (ranks_.size() > 1 && request.output.empty()) {
      throw Error(ErrorCode::bad_argument, "ranks that choose bits together meet beside the output")
          .hint("-o OUT, in a folder that all ranks see");
    }
    const auto& path = request.allocation->save_recipe;
    if (!path.empty() && ranks_.first()) io::check_writable(path, request.overwrite, inputs_of(request));
    select_items();
  }

  Allocated run() {
    const Stopwatch watch;
    Allocated result;
    result.request = request_;
    result.request.allocation.reset();
    if (decoded()) {
      auto& calibrated = *result.request.calibrated;
      if (calibrated.statistics.empty()) calibrate(calibrated, result);
      result.report = choose_by_statistics(calibrated.statistics);
    } else {
      measure_weights();
      result.report =
          choose_by_errors("w4q does not know this architecture: bits were chosen by summed errors of weights");
    }
    if (request_.options.steps.any(&quantize::StepRow::needs_text)) {
      result.report.notes.emplace_back(
          "bits were chosen without the steps that go over the text anew (asym, feedback2, distill)");
    }
    result.request.recipe = recipe(chosen_);
    result.request.keep.clear();
    result.request.lm_head = result.request.embeddings = false;
    const auto& path = request_.allocation->save_recipe;
    if (!path.empty() && ranks_.first()) {
      io::write_file(path, to_json(*result.request.recipe).dump(2) + "\n", request_.overwrite, inputs_of(request_));
    }
    result.report.seconds = watch.seconds();
    return result;
  }

 private:
  bool decoded() const noexcept { return config_.architecture != nullptr; }

  void select_items() {
    std::set<std::string> inside, scaled;
    for (int64_t layer = 0; layer < config_.layers && decoded(); ++layer) {
      for (const auto& linear : model::layer_plan(config_, layer).linears()) inside.insert(linear.name);
    }
    if (decoded()) {
      const auto all = linears_with_input_scale(
          config_, [&](std::string_view) { return std::optional(request_.scheme); }, request_.options.steps);
      scaled.insert(all.begin(), all.end());
    }
    for (const auto& tensor : plan_.tensors) {
      const std::string module(model::module_path(tensor.name));
      if (!tensor.scheme || (decoded() && !inside.contains(module))) {
        fixed_bytes_ += tensor.bytes_after;
        continue;
      }
      items_.push_back(make_item(tensor, scaled.contains(module), *request_.allocation));
      weights_ += items_.back().weights;
    }
    if (items_.empty()) throw Error(ErrorCode::bad_argument, "there is no linear layer to choose bits for");
    tie_items();
    for (const auto& item : items_)
      smallest_ += std::ranges::min(item.choices, {}, &quantize::AllocationChoice::bytes).bytes;
  }

  void calibrate(CalibratedRequest& calibrated, Allocated& result) const {
    result.statistics = std::make_unique<SharedPartial>(ranks_, beside(request_));
    CalibrateRequest wanted;
    wanted.model = request_.model;
    wanted.output = result.statistics->path() / "statistics.safetensors";
    wanted.text = calibrated.text;
    wanted.options.max_memory = calibrated.max_memory;
    wanted.windows = true;
    wanted.ranks = &ranks_;
    calibrate_model(wanted, source_);
    ranks_.barrier();  // the first rank writes the file
    calibrated.statistics = wanted.output;
    // What the run goes over anew stays.
    if (!request_.options.steps.any(&quantize::StepRow::needs_text)) calibrated.text = {};
  }

  /// By the predictions where there is text to measure them on, else by errors.
  AllocationReport choose_by_statistics(const std::filesystem::path& path) {
    const auto file = StatisticsFile::open(path, config_);
    file.check_model(model_identity(source_.folder.tensors));
    const auto windows = file.load_windows();
    sensitivities_ = file.load_sensitivities();
    if (windows.samples == 0) {
      quantize_widths(file, nullptr);
      return choose_by_errors(
          "the statistics keep no text to measure predictions on (w4q calibrate --sensitivity "
          "does): bits were chosen by summed errors of outputs");
    }
    keep_near_widths();
    const SharedPartial folder(ranks_, beside(request_));
    std::optional<WidthStore> store(folder.path());
    quantize_widths(file, &*store);
    auto report = choose_by_predictions(windows, *store);
    store.reset();
    ranks_.barrier();  // nobody reads it any more
    return report;
  }

  /// Widths that lie next to the target, and one more on either side: others are not chosen.
  void keep_near_widths() {
    const size_t all = items_.front().choices.size();
    size_t lower = 0;
    for (size_t choice = 1; choice < all; ++choice) {
      if (size(Choices(items_.size(), choice)) <= target_bytes()) lower = choice;
    }
    const size_t first = lower == 0 ? 0 : lower - 1, end = std::min(all, lower + 3);
    for (auto& item : items_) {
      const auto cut = [&](auto& list) {
        list.erase(list.begin() + static_cast<ptrdiff_t>(std::min(end, list.size())), list.end());
        list.erase(list.begin(), list.begin() + static_cast<ptrdiff_t>(std::min(first, list.size())));
      };
      cut(item.schemes);
      cut(item.tables);
      cut(item.choices);
    }
  }

  /// At every width each layer is quantized as it will be, layers and widths in equal parts by the ranks. Fills the costs
  /// of the choices and, if not null, the store.
  void quantize_widths(const StatisticsFile& file, WidthStore* store) {
    std::map<std::string, Item*, std::less<>> by_name;
    int64_t most = 0;
    for (auto& item : items_) {
      by_name.emplace(item.module, &item);
      most = std::max(most, static_cast<int64_t>(item.schemes.size()));
    }
    // What wants the text anew is left to the run: it changes all widths much alike.
    quantize::QuantizeOptions options = request_.options;
    options.steps = options.steps.without(&quantize::StepRow::needs_text);
    const auto first_of = [&](int rank) { return config_.layers * most * rank / ranks_.size(); };
    const int64_t begin = first_of(ranks_.rank()), end = first_of(ranks_.rank() + 1);
    Progress progress("allocate", end - begin, "layers");
    LayerStatistics statistics;
    for (int64_t part = begin; part < end; ++part) {
      const int64_t layer = part / most;
      const auto choice = static_cast<size_t>(part % most);
      if (part == begin || choice == 0) statistics = file.load(layer);
      const SchemeOf scheme_of = [&](std::string_view module) -> std::optional<Scheme> {
        const auto found = by_name.find(module);
        if (found == by_name.end() || choice >= found->second->schemes.size()) return std::nullopt;
        return found->second->schemes[choice];
      };
      const auto packed = quantize_layer(source_, layer, statistics, {scheme_of, options});
      for (const auto& [module, linear] : packed.linears) {
        by_name.find(module)->second->choices[choice].cost = cost(module, linear.output);
      }
      if (store != nullptr) store->add(layer, choice, packed);
      progress.advance(1);
    }
    share_costs([&](const Item& item, size_t choice) {
      const int64_t part = model::find_linear(config_, item.module)->layer * most + static_cast<int64_t>(choice);
      int rank = 0;
      while (first_of(rank + 1) <= part) ++rank;
      return rank;
    });
    for (int64_t part = 0; part < config_.layers * most && store != nullptr; ++part) {
      if (part < begin || part >= end) store->add_made_by_another(part / most, static_cast<size_t>(part % most));
    }
  }

  /// The costs of all widths at all ranks, of each as the rank owner(item, choice) has measured it.
  template <class Owner>
  void share_costs(const Owner& owner) {
    std::vector<double> costs;
    std::vector<int> owners;
    for (const auto& item : items_) {
      for (size_t choice = 0; choice < item.schemes.size() && ranks_.size() > 1; ++choice) {
        costs.push_back(item.choices[choice].cost);
        owners.push_back(owner(item, choice));
      }
    }
    ranks::exchange(ranks_, costs, [&](size_t i) { return owners[i]; });
    auto next = costs.begin();
    for (auto& item : items_) {
      for (size_t choice = 0; choice < item.schemes.size() && next != costs.end(); ++choice) {
        item.choices[choice].cost = *next++;
      }
    }
  }

  /// Without a decoder: the errors of the weights as the run will round them, by themselves; each rank's of its items.
  void measure_weights() {
    const auto owners = deal_items();
    Progress progress("allocate", std::ranges::count(owners, ranks_.rank()), "tensors");
    for (size_t i = 0; i < items_.size(); ++i) {
      auto& item = items_[i];
      if (owners[i] != ranks_.rank()) continue;
      const auto loaded = std::make_shared<const io::LoadedTensor>(source_.folder.tensors.load(item.tensor));
      const TensorView view = loaded->view();
      const kernels::LinearWeight weight{
          item.module, view.shape[0], view.shape[1], kernels::LinearWeight::Dense{view, loaded}, {}};
      for (size_t choice = 0; choice < item.schemes.size(); ++choice) {
        const Scheme& scheme = item.schemes[choice];
        auto packed = std::make_shared<formats::PackedLinear>();
        packed->name = item.module;
        packed->passes.push_back(quantize::rounding_quantizer(scheme).run(view, scheme, request_.options).weight);
        const auto error = model::compare_weights(weight, {item.module, weight.n, weight.k, packed, {}});
        item.choices[choice].cost = error.relative() * error.relative();
      }
      progress.advance(1);
    }
    share_costs([&](const Item& item, size_t) { return owners[static_cast<size_t>(&item - items_.data())]; });
  }

  std::vector<int> deal_items() const {
    std::vector<WorkUnit> units;
    for (const auto& item : items_) units.push_back({.name = item.module, .tensors = {}, .cost = item.weights});
    std::vector<const WorkUnit*> pointers;
    for (const auto& unit : units) pointers.push_back(&unit);
    return deal(pointers, ranks_.size());
  }

  AllocationReport choose_by_errors(std::string why) {
    set_frontier();
    chosen_ = choose(target_bytes());
    if (chosen_.empty()) refuse_target();
    AllocationReport result = report();
    result.measured = !sensitivities_.empty();
    result.notes.push_back(std::move(why));
    return result;
  }

  AllocationReport choose_by_predictions(const CalibrationWindows& windows, const WidthStore& store) {
    MixProblem problem;
    for (const auto& item : items_) {
      const int64_t layer = model::find_linear(config_, item.module)->layer;
      problem.items.push_back({item.module, layer, 0, item.schemes.size(), item.choices.size() > item.schemes.size()});
      problem.tables.push_back(item.tables);
      auto& bytes = problem.bytes.emplace_back();
      for (const auto& choice : item.choices) bytes.push_back(choice.bytes);
    }
    problem.ties = groups_;
    // What summed errors would choose is one of the mixes that are measured.
    set_frontier();
    const Choices by_errors = choose(target_bytes());
    if (by_errors.empty()) refuse_target();
    const MixChoice found = search(windows, store, problem, by_errors);
    chosen_ = found.mix;
    offset_ = found.base_divergence;
    for (size_t i = 0; i < items_.size(); ++i) {
      const double least = std::ranges::min(found.effects[i]);
      offset_ += least - found.base_divergence;
      for (size_t c = 0; c < items_[i].choices.size(); ++c) items_[i].choices[c].cost = found.effects[i][c] - least;
    }
    set_frontier();
    AllocationReport result = report();
    result.mix = mix_report(windows, found);
    result.memory = MixMeter::memory(source_, windows);
    return result;
  }

  MixChoice search(const CalibrationWindows& windows, const WidthStore& store, const MixProblem& problem,
                   const Choices& by_errors) const {
    // The 16-bit model, the base, the neighbours, two proposals, the best one again; exchanges stop where none helps.
    const int64_t others = 7 * config_.layers;
    const int64_t own = MixMeter::effect_runs(config_, problem.items) / ranks_.size();
    Progress effects("effects", own + others, "runs of a layer");
    MixMeter meter(
        source_, windows, problem.items, store, [&] { effects.advance(1); }, &ranks_);
    return search_mix(meter, problem, target_bytes(), {by_errors});
  }

  MixReport mix_report(const CalibrationWindows& windows, const MixChoice& found) const {
    MixReport result;
    result.windows = windows.samples;
    result.length = windows.length;
    result.divergence = found.divergence;
    result.neighbour_divergence = found.neighbour_divergence;
    result.neighbour = found.neighbour;
    result.base_bits = items_.front().bits(found.base.front());
    result.base_divergence = found.base_divergence;
    result.exchanges_tried = found.exchanges_tried;
    result.exchanges_taken = found.exchanges_taken;
    for (size_t i = 0; i < items_.size(); ++i) {
      auto& effect = result.linears.emplace_back();
      effect.name = items_[i].module;
      effect.bits = items_[i].bits(found.mix[i]);
      for (size_t c = 0; c < found.effects[i].size(); ++c) effect.divergences[items_[i].bits(c)] = found.effects[i][c];
    }
    return result;
  }

  double cost(std::string_view module, const OutputError& error) const {
    if (sensitivities_.empty()) return error.power > 0 ? error.packed / error.power : 0;
    const auto found = sensitivities_.find(module);
    if (found == sensitivities_.end()) {
      throw Error(ErrorCode::internal, concat("allocation: ", module, " is in no layer"));
    }
    return error.packed * found->second;
  }

  int64_t target_bytes() const {
    const auto& target = *request_.allocation;
    if (target.bytes > 0) return target.bytes - target.dialect_bytes - fixed_bytes_;
    return static_cast<int64_t>(target.bits_per_weight * static_cast<double>(weights_) / 8);
  }

  int64_t size(const Choices& choices) const {
    int64_t sum = 0;
    for (size_t i = 0; i < choices.size(); ++i)
      sum += items_[i].choices[choices[i]].bytes + items_[i].tables[choices[i]];
    return sum;
  }

  void set_frontier() {
    std::vector<std::vector<quantize::AllocationChoice>> choices;
    for (const auto& group : groups_) {
      auto& sums = choices.emplace_back(items_[group.front()].choices.size());
      for (const size_t i : group) {
        for (size_t c = 0; c < sums.size(); ++c) {
          sums[c].bytes += items_[i].choices[c].bytes;
          sums[c].cost += items_[i].choices[c].cost;
        }
      }
    }
    frontier_.emplace(std::move(choices));
  }

  /// Of items what was chosen for their groups, and back.
  Choices of_items(const Choices& groups) const {
    Choices choices(groups.empty() ? 0 : items_.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const size_t i : groups_[g]) choices[i] = groups[g];
    }
    return choices;
  }
  Choices of_groups(const Choices& items) const {
    Choices choices;
    for (const auto& group : groups_) choices.push_back(items[group.front()]);
    return choices;
  }

  /// Linears that servers load as one have one width, where that is asked for and their choices are the same.
  void tie_items() {
    std::map<std::pair<std::string, std::vector<int>>, size_t> places;
    for (size_t i = 0; i < items_.size(); ++i) {
      std::vector<int> widths;
      for (size_t c = 0; c < items_[i].choices.size(); ++c) widths.push_back(items_[i].bits(c));
      const bool tied = request_.allocation->tied;
      std::string name = tied ? checkpoint::served_name(items_[i].module) : items_[i].module;
      const auto [place, added] = places.emplace(std::pair(std::move(name), std::move(widths)), groups_.size());
      if (added) groups_.emplace_back();
      groups_[place->second].push_back(i);
    }
  }

  /// The best of at most `bytes`, codebooks included.
  Choices choose(int64_t bytes) const {
    for (int64_t limit = bytes;;) {
      Choices choices = of_items(frontier_->choose(limit));
      if (choices.empty()) return choices;
      const int64_t found = size(choices);
      if (found <= bytes) return choices;
      limit -= found - bytes;
    }
  }

  AllocationPoint point(const Choices& choices) const {
    AllocationPoint result;
    result.bits_per_weight = 8.0 * static_cast<double>(size(choices)) / static_cast<double>(weights_);
    result.divergence = std::max(0.0, frontier_->point(of_groups(choices)).cost + offset_);
    for (size_t i = 0; i < choices.size(); ++i) ++result.tensors[items_[i].bits(choices[i])];
    return result;
  }

  AllocationReport report() const {
    AllocationReport result;
    result.chosen = point(chosen_);
    for (int bits = 1; bits < kept_bits; ++bits) {
      Choices same;
      for (const auto& item : items_) {
        const auto found = std::ranges::find(item.schemes, bits, &Scheme::bits);
        if (found != item.schemes.end()) same.push_back(static_cast<size_t>(found - item.schemes.begin()));
      }
      if (same.size() == items_.size()) result.uniform.push_back(point(same));
    }
    if (result.uniform.empty()) return result;
    const double last = result.uniform.back().bits_per_weight;
    double bits = std::ceil(result.uniform.front().bits_per_weight / frontier_step) * frontier_step;
    for (; bits < last; bits += frontier_step) {
      const auto best = choose(static_cast<int64_t>(bits * static_cast<double>(weights_) / 8));
      if (!best.empty()) result.frontier.push_back(point(best));
    }
    return result;
  }

  /// One rule for each module that is packed or whose width was chosen, so that it can be read and changed by hand.
  quantize::Recipe recipe(const Choices& chosen) const {
    quantize::Recipe result;
    result.steps = request_.options.steps;
    std::map<std::string, std::optional<Scheme>, std::less<>> schemes;
    for (size_t i = 0; i < items_.size(); ++i) {
      const auto& item = items_[i];
      schemes[item.module] = chosen[i] < item.schemes.size() ? std::optional(item.schemes[chosen[i]]) : std::nullopt;
    }
    for (const auto& tensor : plan_.tensors) {
      const std::string module(model::module_path(tensor.name));
      const auto found = schemes.find(module);
      if (found != schemes.end()) {
        result.rules.push_back({module, found->second});
      } else if (tensor.scheme) {
        result.rules.push_back({module, tensor.scheme});
      }
    }
    return result;
  }

  [[noreturn]] void refuse_target() const {
    const double least = 8.0 * static_cast<double>(smallest_) / static_cast<double>(weights_);
    throw Error(ErrorCode::bad_argument, "the target is less than the smallest widths give")
        .detail(concat("they give ", fixed(least, 3), " bits per weight, and tables; ",
                       human_bytes(smallest_ + fixed_bytes_ + request_.allocation->dialect_bytes),
                       " with all that is not allocated"))
        .hint("give more, or --lm-head, --embeddings to pack more of the model");
  }

  const model::OpenedModel& source_;
  const model::ModelConfig& config_;
  const QuantizeRequest& request_;
  ranks::Ranks& ranks_;
  const Plan plan_;
  std::vector<Item> items_;
  std::vector<std::vector<size_t>> groups_;  // of items_ that have one choice
  Sensitivities sensitivities_;
  std::optional<quantize::AllocationFrontier> frontier_;
  Choices chosen_;
  double offset_ = 0;        // of what costs add up to
  int64_t weights_ = 0;      // of all items
  int64_t smallest_ = 0;     // bytes of all items at their smallest, without tables
  int64_t fixed_bytes_ = 0;  // of everything else
};

}  // namespace

Allocated::Allocated() = default;
Allocated::~Allocated() = default;
Allocated::Allocated(Allocated&&) noexcept = default;

std::vector<Scheme> widths_of(const Scheme& scheme) {
  std::vector<Scheme> result;
  if (scheme.family == formats::SchemeFamily::small_float) {
    result.push_back(scheme);
    if (scheme.bits == 4) {
      const bool shared_exponents = scheme.scale == formats::ScaleType::e8m0;
      result.push_back(formats::parse_scheme(shared_exponents ? "mxfp8" : "fp8-channel"));
    }
    return result;
  }
  const auto& quantizer = quantize::rounding_quantizer(scheme);
  for (int bits = 2; bits <= 8; ++bits) {
    Scheme other = scheme;
    other.bits = bits;
    if (formats::exists(other) && quantizer.accepts(other)) result.push_back(other);
  }
  return result;
}

Allocated allocate(const model::OpenedModel& source, const QuantizeRequest& request) {
  return Job(source, request).run();
}

}  // namespace w4q::pipeline
