// Which linear layers of a decoder layer read the same input, and are therefore calibrated together.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/rotation.h"
#include "model/config.h"
#include "quantize/quantizer_registry.h"
#include "quantize/statistics.h"

namespace w4q::pipeline {

struct LinearGroup {
  std::vector<std::string> linears;  ///< module paths in model order; the first one names the group
  int64_t width = 0;                 ///< channels of the input

  const std::string& name() const noexcept { return linears.front(); }
};

inline constexpr size_t groups_per_layer = 4;

/// q k v · o · gate up · down, in this order.
std::array<LinearGroup, groups_per_layer> linear_groups(const model::ModelConfig& config, int64_t layer);

/// The rotation that the input of a linear takes when the model runs: with rotations folded into the model, none but
/// down_proj's.
formats::Rotation run_time_rotation(const quantize::QuantizeOptions& options, std::string_view module);

/// What calibration knows of one layer: the inputs of its groups, in the same order.
using LayerStatistics = std::array<quantize::InputStatistics, groups_per_layer>;

}  // namespace w4q::pipeline
