// How much each linear layer matters: by what its outputs' errors change the model's predictions, measured on text
// (docs/quality.md). The model is walked layer by layer; no more than one of them is in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "model/opened.h"
#include "pipeline/calibrate.h"
#include "pipeline/linear_groups.h"

namespace w4q::pipeline {

/// Nats of KL per token for a unit of output error (a mean square over rows, summed over outputs), by module path.
using Sensitivities = std::map<std::string, double, std::less<>>;

/// Windows that are enough for it, spread evenly over those of the calibration: 8 of at most 128 tokens.
CalibrationWindows sensitivity_windows(const CalibrationWindows& windows);
/// The first tokens of some windows, spread evenly over all.
CalibrationWindows thinned(const CalibrationWindows& windows, int64_t samples, int64_t length);

/// Each linear in turn is rounded to 3 bits; the error of its outputs and the KL of the predictions against the whole
/// model's are measured on the same tokens. Costs as much as decoding the windows so often per layer as half of it has
/// linears; all hidden states, [linears × tokens × hidden] in fp32, are held. `on_run` is called after each run of a
/// layer.
Sensitivities measure_sensitivities(const model::OpenedModel& model, const CalibrationWindows& windows,
                                    const std::function<void()>& on_run = {});

/// Runs of a layer that measure_sensitivities makes.
int64_t sensitivity_runs(const model::ModelConfig& config);

}  // namespace w4q::pipeline
