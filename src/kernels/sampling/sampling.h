// Choosing the next token from a row of logits.
#pragma once

#include <cstdint>
#include <span>

namespace w4q::kernels {

struct SamplingOptions {
  double temperature = 0;  ///< 0: greedy
  int top_k = 0;           ///< keep so many of the likeliest tokens; 0: all
  double top_p = 1;        ///< then the fewest whose probabilities reach this sum
  double min_p = 0;        ///< then those at least this fraction of the likeliest one's probability
  uint64_t seed = 0;
};

/// Throws bad_argument naming the option that is out of range.
void check_sampling(const SamplingOptions& options);

/// The token for draw number `draw` of the seed's stream. Greedy: the largest logit, the lowest id on ties. Otherwise
/// temperature, top_k, top_p and min_p in that order; deterministic in (row, options, draw).
int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t draw);

}  // namespace w4q::kernels
