// How the warpgroup kernels cut a layer into jobs and jobs into shares. A job is 256 outputs × a tile of activation
// rows, or 128 outputs × a tile of 256, over all of k. Blocks work whole jobs off as long as there is one for each; what is left is shared along k by
// teams of blocks, which add up their sums in a fixed order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/properties.h"

namespace w4q::kernels::wgmma {

inline constexpr int most_sharers = 8;

/// Activation rows of a job: those of one product instruction, at most `most`, 128 or 256. Two tiles of 128 are one of
/// 256 where their number is even.
constexpr int tile_rows(int64_t m, int most = 128) {
  if (m <= 64) return m <= 16 ? 16 : m <= 32 ? 32 : 64;
  return (m + 127) / 128 % 2 == 0 ? most : 128;
}
/// Outputs of a job, so that its sums fit the registers.
constexpr int job_outputs(int rows) { return rows <= 128 ? 256 : 128; }

/// Rounds of shared jobs: words for their sums are not used twice in a launch.
constexpr int most_shared_rounds(int rows) { return rows <= 64 ? 2 : 1; }
/// Bytes through which teams exchange sums: fp32, for every block and round. More than the blocks of any other kernel
/// keep: those of the GEMM have 8 bytes for each of 128 outputs × 64 rows.
constexpr size_t exchange_bytes(int multiprocessors) {
  return static_cast<size_t>(multiprocessors) * job_outputs(128) * 128 * 4;
}

/// Whether a GPU runs code for sm_90a.
inline bool runs_on(const device::Properties& gpu) { return gpu.sm == 90; }

struct Plan {
  int jobs = 0;
  int sharers = 1;       ///< blocks of a team
  int teams = 0;         ///< to launch
  int whole_rounds = 0;  ///< jobs that each block does by itself

  constexpr int blocks() const { return teams * sharers; }
  constexpr int shared_rounds() const { return (jobs - whole_rounds * blocks() + teams - 1) / teams; }
  /// Time in jobs: rounds of whole jobs, rounds of shared ones, and `exchange` for each of these.
  constexpr double cost(double exchange) const {
    return whole_rounds + shared_rounds() * (1.0 / sharers + (sharers > 1 ? exchange : 0));
  }
};

/// The plan for at most `blocks` blocks in teams of `sharers`.
constexpr Plan plan_for(int jobs, int sharers, int blocks) {
  Plan plan{jobs, sharers, blocks / sharers, 0};
  if (sharers > 1) plan.whole_rounds = jobs / plan.blocks();
  // Fewer teams than fit, where there is less work.
  if (plan.whole_rounds == 0) plan.teams = std::min(plan.teams, jobs);
  return plan;
}

/// The plan that takes the least time on `blocks` blocks with at most `most_rounds` rounds of shared jobs. `exchange`
/// is what adding up shared sums takes, in jobs.
constexpr Plan best_plan(int jobs, int k_tiles, double exchange, int blocks, int most_rounds) {
  Plan best = plan_for(jobs, 1, blocks);
  for (int sharers = 2; sharers <= std::min({most_sharers, k_tiles, blocks}); ++sharers) {
    const Plan plan = plan_for(jobs, sharers, blocks);
    if (plan.shared_rounds() <= most_rounds && plan.cost(exchange) < best.cost(exchange)) best = plan;
  }
  return best;
}

}  // namespace w4q::kernels::wgmma
