#include "pipeline/allocate.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "io/output.h"
#include "io/partial.h"
#include "model/model.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/recipe_file.h"
#include "pipeline/select_tensors.h"
#include "pipeline/statistics_file.h"
#include "quantize/allocation.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using formats::PlaneRole;
using formats::Scheme;
using Choices = std::vector<size_t>;

constexpr int kept_bits = 16;
constexpr double frontier_step = 0.25;  // bits per weight

/// One linear whose width is to be chosen.
struct Item {
  std::string module;
  int64_t weights = 0;
  std::vector<Scheme> schemes;                      ///< without 16 bit, which is the last choice
  std::vector<int64_t> tables;                      ///< bytes of the codebook of each choice
  std::vector<quantize::AllocationChoice> choices;  ///< sizes without codebooks

  int bits(size_t choice) const { return choice < schemes.size() ? schemes[choice].bits : kept_bits; }
};

Item make_item(const TensorPlan& tensor, bool input_scale) {
  Item item{std::string(model::module_path(tensor.name)), tensor.weights(), widths_of(*tensor.scheme), {}, {}};
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

class Job {
 public:
  Job(const model::OpenedModel& source, const QuantizeRequest& request)
      : source_(source), config_(source.config), request_(request), plan_(select_tensors(source, request)) {
    if (!request.calibrated) {
      throw Error(ErrorCode::bad_argument, "choosing bits needs calibration: it goes by the errors of outputs")
          .hint("--calib FILE or --stats FILE, with steps such as --quality good");
    }
    const auto& path = request.allocation->save_recipe;
    if (!path.empty()) io::check_writable(path, request.overwrite, inputs_of(request));
    select_items();
  }

  Allocated run() {
    const Stopwatch watch;
    Allocated result;
    result.request = request_;
    result.request.allocation.reset();
    auto& calibrated = *result.request.calibrated;
    if (calibrated.statistics.empty()) calibrate(calibrated, result);
    measure(calibrated.statistics);
    std::vector<std::vector<quantize::AllocationChoice>> choices;
    for (const auto& item : items_) choices.push_back(item.choices);
    frontier_.emplace(std::move(choices));
    const Choices chosen = choose(target_bytes());
    if (chosen.empty()) refuse_target();
    result.report = report(chosen);
    result.request.recipe = recipe(chosen);
    result.request.keep.clear();
    result.request.lm_head = result.request.embeddings = false;
    const auto& path = request_.allocation->save_recipe;
    if (!path.empty()) {
      io::write_file(path, to_json(*result.request.recipe).dump(2) + "\n", request_.overwrite, inputs_of(request_));
    }
    result.report.seconds = watch.seconds();
    return result;
  }

 private:
  void select_items() {
    std::set<std::string> inside;
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      for (const auto& linear : model::layer_plan(config_, layer).linears()) inside.insert(linear.name);
    }
    const auto all = linears_with_input_scale(
        config_, [&](std::string_view) { return std::optional(request_.scheme); }, request_.options.steps);
    const std::set<std::string> scaled(all.begin(), all.end());
    for (const auto& tensor : plan_.tensors) {
      const std::string module(model::module_path(tensor.name));
      if (!tensor.scheme || !inside.contains(module)) {
        fixed_bytes_ += tensor.bytes_after;
        continue;
      }
      items_.push_back(make_item(tensor, scaled.contains(module)));
      weights_ += items_.back().weights;
    }
    if (items_.empty()) throw Error(ErrorCode::bad_argument, "there is no linear layer to choose bits for");
  }

  void calibrate(CalibratedRequest& calibrated, Allocated& result) const {
    const auto beside = request_.output.empty() ? std::filesystem::temp_directory_path() / "w4q" : request_.output;
    result.statistics = std::make_unique<io::Partial>(beside, io::Partial::Kind::folder);
    CalibrateRequest wanted;
    wanted.model = request_.model;
    wanted.output = result.statistics->path() / "statistics.safetensors";
    wanted.text = calibrated.text;
    wanted.options.max_memory = calibrated.max_memory;
    wanted.sensitivity = true;
    calibrate_model(wanted, source_);
    calibrated.statistics = wanted.output;
    // What the run goes over anew stays.
    if (!request_.options.steps.any(&quantize::StepRow::needs_walk)) calibrated.text = {};
  }

  /// Fills the costs of all choices: at every width, each layer is quantized as it will be.
  void measure(const std::filesystem::path& path) {
    const auto file = StatisticsFile::open(path, config_);
    file.check_model(model_identity(source_.folder.tensors));
    sensitivities_ = file.load_sensitivities();
    std::map<std::string, Item*, std::less<>> by_name;
    size_t most = 0;
    for (auto& item : items_) {
      by_name.emplace(item.module, &item);
      most = std::max(most, item.schemes.size());
    }
    Progress progress("allocate", config_.layers * static_cast<int64_t>(most), "layers");
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto statistics = file.load(layer);
      for (size_t choice = 0; choice < most; ++choice) {
        const SchemeOf scheme_of = [&](std::string_view module) -> std::optional<Scheme> {
          const auto found = by_name.find(module);
          if (found == by_name.end() || choice >= found->second->schemes.size()) return std::nullopt;
          return found->second->schemes[choice];
        };
        const auto packed = quantize_layer(source_, layer, statistics, {scheme_of, request_.options});
        for (const auto& [module, linear] : packed.linears) {
          by_name.find(module)->second->choices[choice].cost = cost(module, linear.output);
        }
        progress.advance(1);
      }
    }
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
    if (target.bytes > 0) return target.bytes - fixed_bytes_;
    return static_cast<int64_t>(target.bits_per_weight * static_cast<double>(weights_) / 8);
  }

  int64_t table_bytes(const Choices& choices) const {
    int64_t sum = 0;
    for (size_t i = 0; i < choices.size(); ++i) sum += items_[i].tables[choices[i]];
    return sum;
  }

  /// The best of at most `bytes`, codebooks included.
  Choices choose(int64_t bytes) const {
    for (int64_t limit = bytes;;) {
      Choices choices = frontier_->choose(limit);
      if (choices.empty()) return choices;
      const int64_t size = frontier_->point(choices).bytes + table_bytes(choices);
      if (size <= bytes) return choices;
      limit -= size - bytes;
    }
  }

  AllocationPoint point(const Choices& choices) const {
    AllocationPoint result;
    const auto sums = frontier_->point(choices);
    result.bits_per_weight =
        8.0 * static_cast<double>(sums.bytes + table_bytes(choices)) / static_cast<double>(weights_);
    result.divergence = sums.cost;
    for (size_t i = 0; i < choices.size(); ++i) ++result.tensors[items_[i].bits(choices[i])];
    return result;
  }

  AllocationReport report(const Choices& chosen) const {
    AllocationReport result;
    result.chosen = point(chosen);
    result.measured = !sensitivities_.empty();
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
    const double least = 8.0 * static_cast<double>(frontier_->smallest()) / static_cast<double>(weights_);
    throw Error(ErrorCode::bad_argument, "the target is less than the smallest widths give")
        .detail(concat("they give ", fixed(least, 3), " bits per weight, and tables; ",
                       human_bytes(frontier_->smallest() + fixed_bytes_), " with all that is not allocated"))
        .hint("give more, or --lm-head, --embeddings to pack more of the model");
  }

  const model::OpenedModel& source_;
  const model::ModelConfig& config_;
  const QuantizeRequest& request_;
  const Plan plan_;
  std::vector<Item> items_;
  Sensitivities sensitivities_;
  std::optional<quantize::AllocationFrontier> frontier_;
  int64_t weights_ = 0;      // of all items
  int64_t fixed_bytes_ = 0;  // of everything else
};

}  // namespace

Allocated::Allocated() = default;
Allocated::~Allocated() = default;
Allocated::Allocated(Allocated&&) noexcept = default;

std::vector<Scheme> widths_of(const Scheme& scheme) {
  const auto& quantizer = quantize::rounding_quantizer(scheme);
  std::vector<Scheme> result;
  for (int bits = 2; bits <= 8; ++bits) {
    Scheme other = scheme;
    other.bits = bits;
    if (quantizer.accepts(other)) result.push_back(other);
  }
  return result;
}

Allocated allocate(const model::OpenedModel& source, const QuantizeRequest& request) {
  return Job(source, request).run();
}

}  // namespace w4q::pipeline
