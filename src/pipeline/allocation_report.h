// What was chosen when bits were allocated, and what other sizes would give.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::pipeline {

/// One size of the model.
struct AllocationPoint {
  double bits_per_weight = 0;
  double divergence = 0;           ///< expected KL, nats per token
  std::map<int, int64_t> tensors;  ///< how many have this width; 16: kept
};

struct AllocationReport {
  AllocationPoint chosen;
  std::vector<AllocationPoint> uniform;   ///< the same width for all
  std::vector<AllocationPoint> frontier;  ///< the best at sizes a quarter of a bit apart
  bool measured = true;  ///< false: the statistics have no sensitivities, and divergences are sums of relative errors
  double seconds = 0;    ///< of measuring and choosing
};

std::string to_text(const AllocationReport& report);
io::Json to_json(const AllocationReport& report);

}  // namespace w4q::pipeline
