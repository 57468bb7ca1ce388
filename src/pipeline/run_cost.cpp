#include "pipeline/run_cost.h"

#include <algorithm>
#include <map>

#include "core/text.h"
#include "model/model.h"
#include "model/self_text.h"
#include "pipeline/calibrated_cost.h"

namespace w4q::pipeline {
namespace {

using quantize::Step;
using quantize::StepKind;
using quantize::Steps;

/// A product of few rows reads weights that it widens as it goes: measured on small models, 64 sequences at once.
constexpr double few_rows_slowness = 2;
/// Trials are loops over a block, not products.
constexpr double trial_slowness = 8;
constexpr int64_t largest_tried_block = 256;

std::string name_of(const Step& step) {
  const auto& row = quantize::step_row(step.kind);
  return row.blocks.empty() ? std::string(row.name) : concat(row.name, step.block);
}

class Costs {
 public:
  Costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
        const SecondsPerWeight& seconds_per_weight)
      : source_(source), request_(request), seconds_per_weight_(seconds_per_weight) {
    for (const auto& tensor : plan.tensors) {
      if (!tensor.scheme) continue;
      schemes_.emplace(model::module_path(tensor.name), *tensor.scheme);
      weights_ += static_cast<double>(tensor.weights());
      const auto block = static_cast<double>(tensor.scheme->block);
      if (tensor.scheme->block <= largest_tried_block) block_weights_ += static_cast<double>(tensor.weights()) * block;
    }
  }

  std::vector<CostPart> parts() {
    std::vector<CostPart> result;
    const Steps all = request_.options.steps;
    Steps taken;
    double rounding = 0;
    CalibratedCost calibrated;
    const auto& how = request_.calibrated;
    if (how && !how->text.empty() && how->text.self) result.push_back(own_text(how->text));
    if (how) {
      check_calibration(*how, all);
      calibrated = calibration(taken);
      result.push_back({how->statistics.empty() ? std::string(calibration_part) : "statistics", calibrated.seconds,
                        calibrated.memory});
    }
    rounding = sample(taken);
    result.push_back({"rounding", rounding, 0});
    for (const Step& step : all) {
      taken.add(step);
      CostPart part{name_of(step), 0, 0};
      if (quantize::step_row(step.kind).searches || step.kind == StepKind::clip) {
        const double now = std::max(rounding, sample(taken));
        part.seconds += now - rounding;
        rounding = now;
      }
      if (how) {
        const auto now = calibration(taken);
        part.seconds += std::max(0.0, now.seconds - calibrated.seconds);
        part.memory = now.memory;
        calibrated = now;
      }
      if (step.kind == StepKind::feedback) part.seconds += trials(all);
      if (step.kind == StepKind::sweeps) part.seconds += 2 * trials(all);
      result.push_back(std::move(part));
    }
    return result;
  }

 private:
  double rate() {
    if (rate_ == 0) rate_ = measured_product_rate();
    return rate_;
  }

  CostPart own_text(const CalibrationText& text) {
    const auto& config = source_.config;
    double weights = static_cast<double>(config.vocab_size * config.hidden_size);
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      for (const auto& group : model::input_groups(config, layer)) {
        const double share =
            group.expert ? static_cast<double>(config.mixture.chosen) / static_cast<double>(config.mixture.experts)
                         : 1.0;
        for (const auto& linear : group.linears) weights += share * static_cast<double>(linear.n * linear.k);
      }
    }
    const model::SelfText wanted{text.samples, text.length, text.seed};
    return {std::string(own_text_part),
            few_rows_slowness * weights * static_cast<double>(text.samples * text.length) / rate(),
            base_memory + source_.folder.tensors.total_bytes() + model::self_text_memory(config, wanted)};
  }

  CalibratedCost calibration(const Steps& steps) {
    const SchemeOf scheme_of = [&](std::string_view module) -> std::optional<formats::Scheme> {
      const auto found = schemes_.find(module);
      return found == schemes_.end() ? std::nullopt : std::optional(found->second);
    };
    CalibratedRequest how = *request_.calibrated;
    if (!how.statistics.empty() && !steps.any(&quantize::StepRow::needs_text)) how.text = {};
    return calibrated_cost(how, source_, scheme_of, steps, rate());
  }

  double sample(const Steps& steps) {
    QuantizeRequest request = request_;
    request.options.steps = steps;
    return weights_ * seconds_per_weight_(request);
  }

  /// Of ranges or scales, each with feedback inside the block.
  double trials(const Steps& steps) {
    const double count = steps.has(StepKind::clip) ? 17 : steps.has(StepKind::search_scales) ? 41 : 1;
    return trial_slowness * count * block_weights_ / 2 / rate();
  }

  const model::OpenedModel& source_;
  const QuantizeRequest& request_;
  const SecondsPerWeight& seconds_per_weight_;
  std::map<std::string, formats::Scheme, std::less<>> schemes_;
  double weights_ = 0, block_weights_ = 0;
  double rate_ = 0;
};

}  // namespace

std::vector<CostPart> run_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                const SecondsPerWeight& seconds_per_weight) {
  return Costs(source, request, plan, seconds_per_weight).parts();
}

std::vector<PresetCost> preset_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                     const SecondsPerWeight& seconds_per_weight) {
  std::vector<PresetCost> result;
  for (const auto& name : quantize::preset_names()) {
    QuantizeRequest other = request;
    other.options.steps = quantize::preset_steps(name, request.scheme);
    const bool needs = other.options.steps.any(&quantize::StepRow::needs_statistics);
    if (needs && source.config.architecture == nullptr) continue;
    if (!needs) other.calibrated.reset();
    if (needs && !other.calibrated) other.calibrated.emplace();
    const bool reads =
        needs && (other.calibrated->statistics.empty() || other.options.steps.any(&quantize::StepRow::needs_text));
    if (reads && other.calibrated->text.empty()) other.calibrated->text.self = true;
    if (needs && !reads) other.calibrated->text = {};
    PresetCost cost{name, {}, 0, plan.tensor_memory};
    for (const auto& part : run_costs(source, other, plan, seconds_per_weight)) {
      cost.seconds += part.seconds;
      cost.memory = std::max(cost.memory, part.memory);
    }
    for (const Step& step : other.options.steps) cost.steps.push_back(name_of(step));
    result.push_back(std::move(cost));
  }
  return result;
}

}  // namespace w4q::pipeline
