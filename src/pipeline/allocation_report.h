// What was chosen when bits were allocated, and what other sizes would give.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/json.h"
#include "model/kinds.h"

namespace w4q::pipeline {

/// One size of the model.
struct AllocationPoint {
  double bits_per_weight = 0;
  double divergence = 0;           ///< expected KL, nats per token
  std::map<int, int64_t> tensors;  ///< how many have this width; 16: kept
};

/// What one linear's width does to the predictions.
struct LinearEffect {
  std::string name;
  int bits = 0;                       ///< chosen
  std::map<int, double> divergences;  ///< KL in nats per token with this linear alone at a width, all else at base_bits
};

/// What was measured where bits were chosen by the predictions themselves. KL is in nats per token.
struct MixReport {
  int64_t windows = 0, length = 0;  ///< of the text
  double divergence = 0;            ///< of what was chosen
  double neighbour_divergence = 0;  ///< of the two uniform widths next to the target, mixed by layers
  bool neighbour = false;           ///< that mix was chosen: none was better
  int base_bits = 0;                ///< the larger one of those widths: where the effects of linears were measured
  double base_divergence = 0;       ///< with all at that
  int64_t exchanges_tried = 0, exchanges_taken = 0;
  std::vector<LinearEffect> linears;
};

struct AllocationReport {
  AllocationPoint chosen;
  std::vector<AllocationPoint> uniform;   ///< the same width for all
  std::vector<AllocationPoint> frontier;  ///< the best at sizes a quarter of a bit apart
  bool measured = true;  ///< false: the statistics have no sensitivities, and divergences are sums of relative errors
  std::optional<MixReport> mix;  ///< where there was text to measure mixes on
  std::vector<std::string> notes;
  double seconds = 0;  ///< of measuring and choosing
  int64_t memory = 0;  ///< bytes that measuring took, as it is estimated
};

std::string to_text(const AllocationReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const AllocationReport& report);

}  // namespace w4q::pipeline
