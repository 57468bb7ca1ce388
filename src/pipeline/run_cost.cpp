#include "pipeline/run_cost.h"

#include <algorithm>
#include <map>

#include "core/error.h"
#include "core/text.h"
#include "model/model.h"
#include "model/self_text.h"
#include "pipeline/calibrated_cost.h"
#include "quantize/sweep_trellis.h"

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
  Costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan, const MachineSpeed& speed)
      : source_(source), request_(request), speed_(speed) {
    for (const auto& tensor : plan.tensors) {
      if (!tensor.scheme) continue;
      schemes_.emplace(model::module_path(tensor.name), *tensor.scheme);
      weights_ += static_cast<double>(tensor.weights());
      if (tensor.scheme->family == formats::SchemeFamily::trellis)
        ring_weights_ += static_cast<double>(tensor.weights());
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
      if (step.kind == StepKind::sweeps) part.seconds += 2 * trials(all) + ring_sweeps() * rounding;
      result.push_back(std::move(part));
    }
    return result;
  }

 private:
  double rate() const { return speed_.products(); }

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
    return weights_ * speed_.seconds_per_weight(request);
  }

  /// Of ranges or scales, each with feedback inside the block.
  double trials(const Steps& steps) {
    const double count = steps.has(StepKind::clip) ? 17 : steps.has(StepKind::search_scales) ? 41 : 1;
    return trial_slowness * count * block_weights_ / 2 / rate();
  }

  /// Of the time of rounding.
  double ring_sweeps() const {
    return weights_ == 0 ? 0 : std::size(quantize::ring_seams) * quantize::ring_sweep_share * ring_weights_ / weights_;
  }

  const model::OpenedModel& source_;
  const QuantizeRequest& request_;
  const MachineSpeed& speed_;
  std::map<std::string, formats::Scheme, std::less<>> schemes_;
  double weights_ = 0, block_weights_ = 0, ring_weights_ = 0;
};

}  // namespace

std::vector<CostPart> run_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                const MachineSpeed& speed) {
  return Costs(source, request, plan, speed).parts();
}

namespace {

/// The request with a preset's steps instead of its own but for those that change the model.
QuantizeRequest with_preset(QuantizeRequest request, const std::string& name) {
  Steps steps;
  for (const Step& step : request.options.steps) {
    if (quantize::step_row(step.kind).of_model) steps.add(step);
  }
  steps.add(quantize::preset_steps(name, request.scheme));
  request.preset = name, request.options.steps = steps;
  const bool needs = steps.any(&quantize::StepRow::needs_statistics);
  if (!needs) request.calibrated.reset();
  if (!needs) return request;
  if (!request.calibrated) request.calibrated.emplace();
  auto& text = request.calibrated->text;
  const bool reads = request.calibrated->statistics.empty() || steps.any(&quantize::StepRow::needs_text);
  if (reads && text.empty()) text.self = text.length_is_open = text.samples_are_open = true;
  if (!reads) text = {};
  return request;
}

}  // namespace

std::vector<PresetCost> preset_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                     const MachineSpeed& speed,
                                     const std::function<QuantizeRequest(QuantizeRequest)>& settle) {
  std::vector<PresetCost> result;
  for (const auto& name : quantize::preset_names()) {
    QuantizeRequest other = request;
    if (name != request.preset) {
      other = with_preset(std::move(other), name);
      if (other.calibrated && source.config.architecture == nullptr) continue;
      try {
        other = settle(std::move(other));
      } catch (const Error&) {
        continue;  // what this model has no way for
      }
    }
    PresetCost cost{name, {}, 0, plan.tensor_memory};
    for (const auto& part : run_costs(source, other, plan, speed)) {
      cost.seconds += part.seconds;
      cost.memory = std::max(cost.memory, part.memory);
    }
    for (const Step& step : other.options.steps) cost.steps.push_back(name_of(step));
    result.push_back(std::move(cost));
  }
  return result;
}

}  // namespace w4q::pipeline
