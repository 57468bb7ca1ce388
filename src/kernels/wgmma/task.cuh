// What the warps of a warpgroup kernel share: the launch, shared memory, and a block's way through its jobs.
#pragma once

#include <cuda.h>

#include "kernels/wgmma/exchange.cuh"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels::wgmma {

/// Threads of a block and their registers.
template <int rows>
struct Crew {
  static constexpr int consumers = job_outputs(rows) / 64 * 128;
  static constexpr int threads = consumers + 128;  ///< the last four warps fetch, or do nothing
  // A block starts with the registers of `threads` threads, which its warps divide among themselves afterwards.
  static constexpr int start_registers = 65536 / threads / 8 * 8;
  static constexpr int fetcher_registers = 32;
  static constexpr int consumer_registers = rows <= 128 ? 112 : 232;
  static_assert(consumers * consumer_registers + 128 * fetcher_registers <= threads * start_registers);
};
constexpr int most_shared_bytes = 227 * 1024;

/// What a launch needs, resolved on the host.
template <class Weights>
struct Task {
  CUtensorMap x_map;  ///< of activations as they are, where `x` is null
  typename Weights::Source weights;
  const char* x;              ///< arranged, or null
  const float* bias;          ///< [n], or null
  const void* residual;       ///< added to the result: of the type and strides of y, or null
  const void* output_scales;  ///< one per output, in Marlin's order of a single group, or null
  bool bf16_output_scales;
  bool output_scales_in_order;  ///< in the order of outputs instead
  const float* output_factors;  ///< the same in the order of outputs, or null
  void* y;
  int64_t ldy;
  int m, n;
  int k_tiles, row_tiles;
  int jobs, whole_rounds;
  MailboxPair* exchange;  ///< exchange_bytes(), zeros before and after
  float result_factor;
  bool fp32;    ///< y and the residual are f32
  bool swiglu;  ///< linear_fusion.h
  bool wide;    ///< rows of y, and of the residual, may be accessed 16 bytes at a time
};

/// Shared memory of a block: table, stages, room to turn results in, barriers.
template <class Weights, int rows>
struct Memory {
  static constexpr int tiles = rows <= 64 ? 2 : 1;  ///< of 64 inputs in a stage
  static constexpr int x_tile_bytes = rows * 128;
  static constexpr int stage_bytes = (tiles * x_tile_bytes + Weights::stage_bytes(tiles) + 1023) / 1024 * 1024;
  static constexpr int turn_bytes = Crew<rows>::consumers / 32 * 1024;
  static constexpr int barrier_bytes = 256;
  static constexpr int room = most_shared_bytes - Weights::table_bytes - turn_bytes - barrier_bytes;
  static constexpr int stages = room / stage_bytes < 8 ? room / stage_bytes : 8;
  static constexpr int stages_at = Weights::table_bytes;
  static constexpr int turn_at = stages_at + stages * stage_bytes;
  static constexpr int barriers_at = turn_at + turn_bytes;
  static constexpr int bytes = barriers_at + barrier_bytes;
  static_assert(stages >= 2 && stages_at % 1024 == 0);

  __device__ static uint32_t full(uint32_t shared, int stage) { return shared + barriers_at + 8 * stage; }
  __device__ static uint32_t empty(uint32_t shared, int stage) { return shared + barriers_at + 128 + 8 * stage; }
};

/// The ring's place at hand and the parity of its barriers.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

/// A block's way through its jobs.
struct JobCursor {
  int job, left;  ///< `left` whole rounds
  int sharers, rank, team, teams, jobs;
  int round = 0;  ///< of shared jobs

  template <class Weights>
  __device__ explicit JobCursor(const Task<Weights>& task, int sharers_)
      : left(task.whole_rounds),
        sharers(sharers_),
        rank(static_cast<int>(blockIdx.x) % sharers_),
        team(static_cast<int>(blockIdx.x) / sharers_),
        teams(static_cast<int>(gridDim.x) / sharers_),
        jobs(task.jobs) {
    job = left > 0 ? static_cast<int>(blockIdx.x) : team;
  }
  __device__ bool valid() const { return job < jobs; }
  __device__ bool shared() const { return left == 0 && sharers > 1; }
  __device__ void next() {
    if (left == 0) {
      job += teams;
      ++round;
    } else {
      --left;
      job += left > 0 ? static_cast<int>(gridDim.x) : static_cast<int>(gridDim.x) - static_cast<int>(blockIdx.x) + team;
    }
  }
  /// The first share of the team's sums in memory.
  __device__ int64_t exchange() const { return (int64_t{round} * teams + team) * sharers; }
  /// The block's tiles along k.
  __device__ int begin(int k_tiles) const { return shared() ? rank * k_tiles / sharers : 0; }
  __device__ int end(int k_tiles) const { return shared() ? (rank + 1) * k_tiles / sharers : k_tiles; }
};

}  // namespace w4q::kernels::wgmma
