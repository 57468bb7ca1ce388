// Which linear layers of a decoder layer read the same input, and are therefore calibrated together.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
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

/// What calibration knows of one layer: the inputs of its groups, in the same order.
using LayerStatistics = std::array<quantize::InputStatistics, groups_per_layer>;

}  // namespace w4q::pipeline
