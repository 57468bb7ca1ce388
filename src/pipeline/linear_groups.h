// Linear layers of a decoder layer that read the same input are calibrated together.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/rotation.h"
#include "model/layer_plan.h"
#include "quantize/quantizer_registry.h"
#include "quantize/statistics.h"

namespace w4q::pipeline {

/// The rotation that the input of a group takes when the model runs: with rotations folded into the model, none where
/// they stand in the input already.
formats::Rotation run_time_rotation(const quantize::QuantizeOptions& options, const model::InputGroup& group);

/// What calibration knows of one layer: the inputs of its groups (model::input_groups), in the same order.
using LayerStatistics = std::vector<quantize::InputStatistics>;

/// Linears that have other weights than when their layer was looked at before; nothing: any may.
using ChangedLinears = std::optional<std::vector<std::string>>;

}  // namespace w4q::pipeline
