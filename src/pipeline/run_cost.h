// What a run of w4q quantize will take, part by part: estimates from the sizes of the model and from what this machine
// does now.
#pragma once

#include <functional>

#include "model/opened.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

/// Seconds to round one weight with the steps of a request, without calibration; measured.
using SecondsPerWeight = std::function<double(const QuantizeRequest&)>;

/// The parts of a run in their order: text that the model writes, calibration, rounding, every step by its name. What
/// an allocation takes is not among them. Memory is that of a part while it runs.
std::vector<CostPart> run_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                const SecondsPerWeight& seconds_per_weight);

/// What the presets would take in the place of the request's steps, those that this model allows. A preset that needs
/// calibration has the request's, or else text of the model's own.
std::vector<PresetCost> preset_costs(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
                                     const SecondsPerWeight& seconds_per_weight);

}  // namespace w4q::pipeline
