// What w4q inspect says of one packed weight: its scales, its codes, its zero points.
#pragma once

#include <string>

#include "formats/packed.h"
#include "io/json.h"

namespace w4q::app {

struct PackedSummary {
  std::string text;
  io::Json json;
};

/// Of a canonical weight.
PackedSummary summarize(const formats::PackedWeight& weight);

}  // namespace w4q::app
