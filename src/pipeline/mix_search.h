// The mix of widths with the least measured KL among those of a size: what effects of single linears add up to, compared
// with what is simply at hand, and then exchanges of bits between linears as long as they help (docs/quality.md).
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pipeline/mix_meter.h"

namespace w4q::pipeline {

/// What there is to choose from. Tables are what does not grow with the weights; both in bytes, [item][choice].
struct MixProblem {
  std::vector<MixItem> items;
  std::vector<std::vector<int64_t>> bytes;
  std::vector<std::vector<int64_t>> tables;
  /// Items that have one choice, ascending, each item once; empty: each has its own.
  std::vector<std::vector<size_t>> ties = {};

  int64_t size(const Mix& mix) const;
  /// `ties`, or each item by itself.
  std::vector<std::vector<size_t>> groups() const;
};

/// [item][choice]; any finite values.
using MixCosts = std::vector<std::vector<double>>;

/// The least sum of costs within `limit` bytes, by an exact knapsack; empty where even the smallest choices are larger.
Mix cheapest_mix(const MixProblem& problem, const MixCosts& costs, int64_t limit);

/// The mixes of that size that need no measuring: of the two choices whose uniform sizes lie next to the limit the
/// larger one in as many items as fit, counted from the first and from the last; a uniform one where it fits exactly.
std::vector<Mix> neighbour_mixes(const MixProblem& problem, int64_t limit);

/// Exchange: one item a choice up, others down as far as that takes, by what effects promise; tied items together.
struct MixExchange {
  std::vector<std::pair<size_t, size_t>> changes;  ///< item, new choice
  double promised = 0;                             ///< change of the KL
};
/// The most promising ones from `mix` within `limit`, at most `count`, the best first.
std::vector<MixExchange> promising_exchanges(const MixProblem& problem, const MixCosts& effects, const Mix& mix,
                                             int64_t limit, size_t count);

struct MixChoice {
  Mix mix;
  double divergence = 0;            ///< measured, nats per token
  double neighbour_divergence = 0;  ///< of the better one of neighbour_mixes()
  bool neighbour = false;           ///< it was better than all that was proposed
  MixCosts effects;                 ///< KL with each choice of each item, all else as in `base`
  Mix base;                         ///< the larger one of the choices next to the limit, for all
  double base_divergence = 0;       ///< its KL
  int64_t exchanges_tried = 0, exchanges_taken = 0;
};

/// So many exchanges are tried at most.
inline constexpr int64_t most_exchanges = 32;

/// Effects are measured once; what they add up to, the neighbours and `proposals` (mixes within the limit from
/// elsewhere) are measured as they are, and the best one is improved by exchanges that are taken where the measured KL
/// falls. `on_try` is called after each of these mixes. There is a mix within the limit.
MixChoice search_mix(MixMeter& meter, const MixProblem& problem, int64_t limit, const std::vector<Mix>& proposals,
                     int64_t tries = most_exchanges, const std::function<void()>& on_try = {});

}  // namespace w4q::pipeline
