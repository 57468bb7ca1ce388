// The main loop of the warpgroup kernels: y = x · Wᵀ + b for 9 and more activation rows on sm_90a.
//
// A block has four warpgroups, 64 outputs each, and two warps that fetch: weights and activations come by bulk copies
// into a ring of stages in shared memory, activations from where they stand or arranged (wgmma_arrange.h). A warp
// decodes its sixteen outputs of a tile to registers of A while the products of the registers before run, so that
// decoding costs no time of the tensor cores. Which blocks do what is the host's plan (wgmma_plan.h).
#pragma once

#include "device/fragment.cuh"
#include "kernels/wgmma_exchange.cuh"
#include "kernels/wgmma_instruction.cuh"
#include "kernels/wgmma_pipeline.cuh"
#include "kernels/wgmma_plan.h"

namespace w4q::kernels::wgmma {

constexpr int consumers = job_outputs / 64 * 128;
constexpr int threads = consumers + 128;  ///< the last four warps fetch, or do nothing
// A block starts with the registers of `threads` threads, which its warps divide among themselves afterwards.
constexpr int start_registers = 65536 / threads / 8 * 8;
constexpr int fetcher_registers = 32;
constexpr int consumer_registers = 112;
static_assert(consumers * consumer_registers + 128 * fetcher_registers <= threads * start_registers);
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
  void* y;
  int64_t ldy;
  int m, n;
  int k_tiles, row_tiles;
  int jobs, whole_rounds;
  SumPair* exchange;  ///< exchange_bytes(), zeros before and after
  float result_factor;
  bool wide;  ///< rows of y may be written 16 bytes at a time, and nothing is added to them
};

/// Shared memory of a block: table, stages, room to turn results in, barriers.
template <class Weights, int rows>
struct Memory {
  static constexpr int tiles = rows <= 64 ? 2 : 1;  ///< of 64 inputs in a stage
  static constexpr int x_tile_bytes = rows * 128;
  static constexpr int stage_bytes = (tiles * x_tile_bytes + Weights::stage_bytes(tiles) + 1023) / 1024 * 1024;
  static constexpr int turn_bytes = consumers / 32 * 1024;
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

/// A fetching warp's way through the stages of all jobs: one fetches weights, one activations. One lane of each does
/// everything: the copy engine takes its orders from registers that a warp shares, and orders that differ between lanes
/// take some 200 clocks each.
template <class Weights, int rows, bool of_weights>
struct Fetcher {
  using M = Memory<Weights, rows>;
  const Task<Weights>& task;
  const uint32_t shared;
  JobCursor job;
  Ring<M::stages> ring;
  int tile, end;
  int strip, row_tile;

  __device__ Fetcher(const Task<Weights>& task_, uint32_t shared_, int sharers)
      : task(task_), shared(shared_), job(task_, sharers) {
    enter();
  }
  /// The stages of the first job that fit in an empty ring.
  __device__ void begin() {
    for (int i = 0; i < M::stages && job.valid() && tile < end; ++i, next()) fetch();
  }
  /// Everything that is left; all lanes.
  __device__ void run(bool leader) {
    while (job.valid()) {
      for (; leader && tile < end; next()) {
        wait_barrier(M::empty(shared, ring.stage), ring.parity ^ 1);
        fetch();
      }
      __syncwarp();
      job.next();
      if (job.valid()) enter();
    }
  }

 private:
  __device__ void enter() {
    tile = job.begin(task.k_tiles);
    end = job.end(task.k_tiles);
    strip = job.job / task.row_tiles;
    row_tile = job.job % task.row_tiles;
  }
  __device__ void next() {
    tile += M::tiles;
    ring.next();
  }
  __device__ void fetch() const {
    const uint32_t stage = shared + M::stages_at + ring.stage * M::stage_bytes;
    const uint32_t full = M::full(shared, ring.stage);
    const int count = min(M::tiles, end - tile);
    if constexpr (of_weights) {
      arrive_and_expect(full, count * (M::x_tile_bytes + Weights::tile_bytes(task.weights)));
    } else if (task.x != nullptr) {
      const int64_t at = static_cast<int64_t>(row_tile) * task.k_tiles + tile;
      copy_bulk(stage, task.x + at * M::x_tile_bytes, count * M::x_tile_bytes, full);
      return;
    }
#pragma unroll
    for (int i = 0; i < M::tiles; ++i) {
      if (i > 0 && i >= count) break;
      if constexpr (of_weights) {
        Weights::template fetch<M::tiles>(task.weights, strip, tile + i, stage + M::tiles * M::x_tile_bytes, i, full);
      } else {
        copy_box(stage + i * M::x_tile_bytes, &task.x_map, make_int2(64 * (tile + i), rows * row_tile), full);
      }
    }
  }
};

/// A lane's place in the results of a job.
struct Lane {
  int output;  ///< of half 0, in the job
  int row;     ///< of element 0 of the first group of eight
  __device__ Lane()
      : output(static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        row(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

/// Where a job's results go.
template <class Weights, int rows>
struct Results {
  using Type = typename Weights::Type;
  using Scalar = typename Type::Scalar;
  const Task<Weights>& task;
  int first_output, first_row;

  __device__ Results(const Task<Weights>& task_, int job)
      : task(task_), first_output(job / task_.row_tiles * job_outputs), first_row(job % task_.row_tiles * rows) {}

  /// What a sum of an output is multiplied with, and what is added.
  __device__ float2 scale_and_bias(int output) const {
    const int at = first_output + output;
    if (at >= task.n) return make_float2(0, 0);
    float scale = task.result_factor;
    if (task.output_scales != nullptr) {
      const int c = at % 32;
      const auto bits =
          static_cast<const unsigned short*>(task.output_scales)[at - c + 8 * (c % 8 / 2) + 2 * (c / 8) + c % 2];
      scale *= task.bf16_output_scales ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                       : __half2float(__ushort_as_half(bits));
    }
    return make_float2(scale, task.bias != nullptr ? task.bias[at] : 0);
  }
  __device__ Scalar* at(int output, int row) const {
    return static_cast<Scalar*>(task.y) + (first_row + row) * task.ldy + first_output + output;
  }
  __device__ bool inside(int output, int row) const {
    return first_output + output < task.n && first_row + row < task.m;
  }
  __device__ void store(int output, int row, float value) const {
    if (!inside(output, row)) return;
    Scalar* const to = at(output, row);
    if (task.residual != nullptr) {
      value += Type::widen(static_cast<const Scalar*>(task.residual)[to - static_cast<const Scalar*>(task.y)]);
    }
    *to = Type::narrow(value);
  }

  /// Sums of a whole job, turned in `turn` so that a lane has eight neighbouring outputs.
  __device__ void store_all(const float (&sums)[rows / 2], char* turn) const {
    const Lane lane;
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
    const float2 by[2] = {scale_and_bias(lane.output), scale_and_bias(lane.output + 8)};
    char* const mine = turn + warp * 1024;
#pragma unroll
    for (int j = 0; j < rows / 8; j += 2) {
      char* const half = mine + j / 2 % 2 * 512;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i / 2) + 2 * (i % 2);
        pairs[i] = Type::pack(sums[at] * by[i % 2].x + by[i % 2].y, sums[at + 1] * by[i % 2].x + by[i % 2].y);
      }
      store_transposed(shared_address(half) + (id / 16 * 8 + id % 8) * 32 + id / 8 % 2 * 16, pairs);
      __syncwarp();
      store_eight(warp * 16 + id % 2 * 8, 8 * j + id / 2, *reinterpret_cast<const uint4*>(half + id * 16));
    }
  }

 private:
  /// Eight results of a row. A residual is added to the 16-bit values.
  __device__ void store_eight(int output, int row, const uint4& values) const {
    if (first_row + row >= task.m) return;
    if (task.wide && first_output + output + 8 <= task.n) {
      *reinterpret_cast<uint4*>(at(output, row)) = values;
      return;
    }
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = i < 4 ? (i < 2 ? words[0] : words[1]) : (i < 6 ? words[2] : words[3]);
      const auto bits = static_cast<unsigned short>(word >> (i % 2 * 16));
      store(output + i, row, Type::widen(reinterpret_cast<const Scalar&>(bits)));
    }
  }
};

/// Adds up the sums of a team: pairs of sums are dealt to its blocks, each collects all shares of its own, adds them in
/// the order of the blocks and stores the results. Whoever waits needs one trip to the L2 cache and no fence. Teams are
/// neighbours: blocks begin in their order, so that at most one team of a launch waits for blocks that have not begun.
template <class Weights, int rows>
__device__ __forceinline__ void store_shared(const Results<Weights, rows>& results, const float (&sums)[rows / 2],
                                             const JobCursor& job, SumPair* exchange) {
  constexpr int pairs = rows / 4;
  const Lane lane;
  const float2 by[2] = {results.scale_and_bias(lane.output), results.scale_and_bias(lane.output + 8)};
  const int64_t share = int64_t{pairs} * consumers;
  SumPair* const shares = exchange + job.exchange() * share + threadIdx.x;
#pragma unroll
  for (int pair = 0; pair < pairs; ++pair) {
    send(shares + job.rank * share + pair * consumers, sums[2 * pair], sums[2 * pair + 1]);
  }
  const int each = (pairs + job.sharers - 1) / job.sharers;
  const int stop = min(pairs, (job.rank + 1) * each);
  int pair = job.rank * each;
  const auto take = [&]<int at_once, int most>() {
    for (; pair < stop; pair += at_once) {
      collect<at_once, most>(shares + pair * consumers, share, job.sharers, consumers, stop - pair,
                             [&](int i, float2 total) {
                               const int half = (pair + i) % 2;
                               const int row = (pair + i) / 2 * 8 + lane.row;
                               const float2 scale = by[half];
                               results.store(lane.output + 8 * half, row, total.x * scale.x + scale.y);
                               results.store(lane.output + 8 * half, row + 1, total.y * scale.x + scale.y);
                             });
    }
  };
  // Many words at once: a trip to the L2 cache takes as long as some hundred instructions.
  constexpr int of_two = std::min(pairs / 2, 8);
  constexpr int of_many = pairs < 8 ? 1 : 2;
  if (job.sharers <= 2) {
    take.template operator()<of_two, 2>();
  } else {
    take.template operator()<of_many, most_sharers>();
  }
}

/// One warp's multiplying.
template <class Weights, int rows>
struct Multiplier {
  using M = Memory<Weights, rows>;
  using Type = typename Weights::Type;
  static constexpr int steps = 2 * M::tiles;  ///< of a group: two groups a stage
  using Decoder = typename Weights::template Decoder<M::tiles>;

  const uint32_t shared;
  const Decoder decoder;
  Ring<M::stages> ring;

  /// The sums over `tiles` tiles, more than none.
  __device__ __forceinline__ void run(int tiles, float (&sums)[rows / 2]) {
    uint32_t a[2][steps][4];
    int add = 0;
    int last = -1;
#pragma unroll
    for (float& sum : sums) sum = 0;
    typename Weights::Words words[M::tiles];
    load(words);
    for (; tiles >= M::tiles; tiles -= M::tiles) {
      const int stage = ring.stage;
      const uint64_t x = describe_rows(shared + M::stages_at + stage * M::stage_bytes);
      multiply_steps(words[0], 0, x, a[0], sums, add);
      wait_products<1>();  // the other group's registers are free
      release(last);
      constexpr int second = M::tiles - 1;
      multiply_steps(words[second], steps % 4, x + second * (M::x_tile_bytes / 16), a[1], sums, add);
      ring.next();
      if (tiles > M::tiles) load(words);
      wait_products<1>();
      last = stage;
    }
    wait_products<0>();
    release(last);
    if (M::tiles == 1 || tiles == 0) return;
    multiply_steps(words[0], 0, describe_rows(shared + M::stages_at + ring.stage * M::stage_bytes), a[0], sums, add);
    wait_products<0>();
    release(ring.stage);
    ring.next();
  }

 private:
  /// Decodes a group of steps to `a` and starts its products.
  __device__ __forceinline__ void multiply_steps(const typename Weights::Words& words, int first_step, uint64_t x,
                                                 uint32_t (&a)[steps][4], float (&sums)[rows / 2], int& add) {
#pragma unroll
    for (int i = 0; i < steps; ++i) decoder.decode(words, first_step + i, a[i]);
    order_registers();
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      multiply<Type>(sums, a[i], x + (first_step + i) * columns_16, add);
      add = 1;
    }
    close_products();
  }
  /// The lane's words of the stage at hand, as soon as it is full.
  __device__ __forceinline__ void load(typename Weights::Words (&words)[M::tiles]) const {
    wait_barrier(M::full(shared, ring.stage), ring.parity);
#pragma unroll
    for (int tile = 0; tile < M::tiles; ++tile) decoder.load(ring.stage * M::stage_bytes, tile, words[tile]);
  }
  __device__ void release(int stage) const {
    if (stage >= 0 && threadIdx.x % 32 == 0) arrive(M::empty(shared, stage));
  }
};

/// What the warps do that multiply nothing: all help with the table, the first two fetch.
template <class Weights, int rows>
__device__ __forceinline__ void fetch_jobs(const Task<Weights>& task, char* memory, int sharers, int warp) {
  using M = Memory<Weights, rows>;
  constexpr int first_warp = consumers / 32;
  const uint32_t shared = shared_address(memory);
  const bool leader = is_leader();
  if (warp == first_warp) {
    Fetcher<Weights, rows, true> weights(task, shared, sharers);
    if (leader) {
      for (int stage = 0; stage < M::stages; ++stage) {
        init_barrier(M::full(shared, stage), 1);
        init_barrier(M::empty(shared, stage), first_warp);
      }
      publish_barriers();
      weights.begin();
    }
    __syncwarp();
    Weights::fill_table(memory, task.weights);
    __syncthreads();
    weights.run(leader);
    return;
  }
  Weights::fill_table(memory, task.weights);
  __syncthreads();
  if (warp != first_warp + 1) return;
  if (leader && task.x == nullptr) prefetch_map(&task.x_map);
  Fetcher<Weights, rows, false> activations(task, shared, sharers);
  device::wait_for_previous_launch();
  activations.run(leader);
}

template <class Weights, int rows>
__global__ void __launch_bounds__(threads, 1)
    wgmma_kernel(const __grid_constant__ Task<Weights> task, const int sharers) {
  using M = Memory<Weights, rows>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  device::allow_next_launch();
  if (warp >= consumers / 32) {
    give_registers<fetcher_registers>();
    fetch_jobs<Weights, rows>(task, memory, sharers, warp);
    return;
  }
  take_registers<consumer_registers>();
  Weights::fill_table(memory, task.weights);
  __syncthreads();
  Multiplier<Weights, rows> multiplier{
      shared, {memory, memory + M::stages_at + M::tiles * M::x_tile_bytes, task.weights, warp / 4, warp % 4}, {}};
  for (JobCursor job(task, sharers); job.valid(); job.next()) {
    float sums[rows / 2];
    multiplier.run(job.end(task.k_tiles) - job.begin(task.k_tiles), sums);
    const Results<Weights, rows> results(task, job.job);
    if (job.shared()) {
      store_shared(results, sums, job, task.exchange);
    } else {
      results.store_all(sums, memory + M::turn_at);
    }
  }
}

}  // namespace w4q::kernels::wgmma
