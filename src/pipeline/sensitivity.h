// How much each linear layer matters: by what its outputs' errors change the model's predictions, measured on text
// (docs/quality.md). The model is walked layer by layer; no more than one of them is in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"
#include "pipeline/calibrate.h"
#include "pipeline/linear_groups.h"

namespace w4q::pipeline {

/// Linears of a layer in model order: q k v · o · gate up · down.
inline constexpr int64_t linears_per_layer = 7;

/// Nats of KL per token for a unit of output error (a mean square over rows, summed over outputs), [layers × 7].
using Sensitivities = std::vector<double>;

/// Windows that are enough for it, spread evenly over those of the calibration: 8 of at most 128 tokens.
CalibrationWindows sensitivity_windows(const CalibrationWindows& windows);

/// Each linear in turn is rounded to 3 bits; the error of its outputs and the KL of the predictions against the whole
/// model's are measured on the same tokens. Costs as much as decoding the windows 3.5 times per layer; all hidden
/// states, [7 · layers × tokens × hidden] in fp32, are held. `on_run` is called after each run of a layer.
Sensitivities measure_sensitivities(const io::Checkpoint& checkpoint, const model::ModelConfig& config,
                                    const CalibrationWindows& windows, const std::function<void()>& on_run = {});

/// Runs of a layer that measure_sensitivities makes.
int64_t sensitivity_runs(const model::ModelConfig& config) noexcept;

}  // namespace w4q::pipeline
