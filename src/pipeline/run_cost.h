// What a run of w4q quantize will take, part by part: estimates from the sizes of the model and from what this machine
// does now.
#pragma once

#include <functional>

#include "model/opened.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

/// What this machine does now. Each is measured once, so that estimates agree with one another.
struct MachineSpeed {
  std::function<double(const QuantizeRequest&)> seconds_per_weight;  ///< to round it with the steps, uncalibrated
  std::function<double()> products;                                  ///< multiplications a second
};

/// The parts of a run in their order: text that the model writes, calibration, rounding, every step by its name. What
/// an allocation takes is not among them. Memory is that of a part while it runs.
std::vector<CostPart> run_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                const MachineSpeed& speed);

/// What the presets would take in the place of the request's steps, those that this model allows; of the request's own
/// preset what run_costs() says. One that needs calibration has the request's, or else text of the model's own. `settle`:
/// the request with what follows from the model, or an error.
std::vector<PresetCost> preset_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                     const MachineSpeed& speed,
                                     const std::function<QuantizeRequest(QuantizeRequest)>& settle);

}  // namespace w4q::pipeline
