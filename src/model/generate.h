// Greedy and sampled generation.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/decoder.h"

namespace w4q::model {

struct SamplingOptions {
  double temperature = 0;  ///< 0: greedy
  int top_k = 0;           ///< 0: all
  double top_p = 1;
  double min_p = 0;
  uint64_t seed = 0;
};

/// Appends up to `max_tokens` tokens to `prompt`; stops at an end-of-sequence token of the config. `on_token` sees each
/// new token and stops the generation by returning false. Deterministic for a given seed, machine and thread count or
/// not.
std::vector<int32_t> generate(const Model& model, std::span<const int32_t> prompt, int64_t max_tokens,
                              const SamplingOptions& sampling, const std::function<bool(int32_t)>& on_token);

}  // namespace w4q::model
