// How the warpgroup kernels cut a layer into jobs and jobs into shares. A job is 256 outputs × a tile of activation
// rows over all of k. Blocks work whole jobs off as long as there is one for each; what is left is shared
// along k by the blocks of a cluster, which add up their sums in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace w4q::kernels::wgmma {

inline constexpr int job_outputs = 256;
inline constexpr int most_sharers = 8;

/// Activation rows of a job: those of one product instruction.
constexpr int tile_rows(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128; }

struct Plan {
  int jobs = 0;
  int sharers = 1;       ///< blocks of a cluster
  int clusters = 0;      ///< to launch
  int whole_rounds = 0;  ///< jobs that each block does by itself

  constexpr int blocks() const { return clusters * sharers; }
  /// Time in jobs: rounds of whole jobs, rounds of shared ones, and `exchange` for each of these.
  constexpr double cost(double exchange) const {
    const int rest = jobs - whole_rounds * blocks();
    const int rounds = (rest + clusters - 1) / clusters;
    return whole_rounds + rounds * (1.0 / sharers + (sharers > 1 ? exchange : 0));
  }
};

/// The plan for `clusters` clusters of `sharers` blocks that run at the same time.
constexpr Plan plan_for(int jobs, int sharers, int clusters) {
  Plan plan{jobs, sharers, clusters, 0};
  if (sharers > 1) plan.whole_rounds = jobs / plan.blocks();
  // Fewer clusters than fit, where there is less work.
  if (plan.whole_rounds == 0) plan.clusters = std::min(clusters, jobs);
  return plan;
}

/// The plan that takes the least time. `fitting(sharers)` is how many clusters of a size run at once, `exchange` what
/// adding up shared sums takes, in jobs.
template <class Fitting>
Plan best_plan(int jobs, int k_tiles, double exchange, const Fitting& fitting) {
  Plan best = plan_for(jobs, 1, fitting(1));
  for (int sharers = 2; sharers <= std::min(most_sharers, k_tiles); ++sharers) {
    const int clusters = fitting(sharers);
    if (clusters == 0) continue;
    const Plan plan = plan_for(jobs, sharers, clusters);
    if (plan.cost(exchange) < best.cost(exchange)) best = plan;
  }
  return best;
}

}  // namespace w4q::kernels::wgmma
