// The main loop of the warpgroup kernels: y = x · Wᵀ + b for 9 and more activation rows on sm_90a.
//
// A block has four warpgroups (two where jobs have 256 rows), 64 outputs each, and two warps that fetch: weights and activations come by bulk copies
// into a ring of stages in shared memory, activations from where they stand or arranged (arrange.h). A warp
// decodes its sixteen outputs of a tile to registers of A while the products of the registers before run, so that
// decoding costs no time of the tensor cores. Which blocks do what is the host's plan (plan.h).
//
// Weights that make inputs (rotated/wgmma_decode.cuh) have the blocks of a launch rotate and arrange x together before
// they begin (rotated/share.cuh).
#pragma once

#include "device/fragment.cuh"
#include "kernels/frame/grid_barrier.cuh"
#include "kernels/wgmma/instruction.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/results.cuh"

namespace w4q::kernels::wgmma {

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
      fetch_weights(stage, count, full);
    } else if constexpr (Weights::makes_inputs) {
      fetch_made(stage, count, full);
    } else {
      fetch_inputs(stage, count, full);
    }
  }
  __device__ void fetch_weights(uint32_t stage, int count, uint32_t full) const {
    arrive_and_expect(full, count * (M::x_tile_bytes + Weights::tile_bytes(task.weights)));
#pragma unroll
    for (int i = 0; i < M::tiles; ++i) {
      if (i > 0 && i >= count) break;
      Weights::template fetch<M::tiles>(task.weights, strip, tile + i, stage + M::tiles * M::x_tile_bytes, i, full);
    }
  }
  __device__ void fetch_inputs(uint32_t stage, int count, uint32_t full) const {
    if (task.x != nullptr) {
      const int64_t at = static_cast<int64_t>(row_tile) * task.k_tiles + tile;
      copy_bulk(stage, task.x + at * M::x_tile_bytes, count * M::x_tile_bytes, full);
      return;
    }
#pragma unroll
    for (int i = 0; i < M::tiles; ++i) {
      if (i > 0 && i >= count) break;
      copy_box(stage + i * M::x_tile_bytes, &task.x_map, make_int2(64 * (tile + i), rows * row_tile), full);
    }
  }
  /// Activations that the blocks have made. Where the passes share a rotation they begin anew with the second.
  __device__ void fetch_made(uint32_t stage, int count, uint32_t full) const {
    const int tiles = Weights::input_tiles(task.weights);
    const char* const from = task.weights.arranged + static_cast<int64_t>(row_tile) * tiles * M::x_tile_bytes;
    const int at = tile < tiles ? tile : tile - tiles;
    const int before = min(count, tiles - at);
    copy_bulk(stage, from + at * M::x_tile_bytes, before * M::x_tile_bytes, full);
    if (before == count) return;
    copy_bulk(stage + before * M::x_tile_bytes, from, (count - before) * M::x_tile_bytes, full);
  }
};

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

  /// The sums over `tiles` tiles from tile `at` on, more than none.
  __device__ __forceinline__ void run(int at, int tiles, float (&sums)[rows / 2]) {
    uint32_t a[2][steps][4];
    int add = 0;
    int last = -1;
#pragma unroll
    for (float& sum : sums) sum = 0;
    typename Weights::Words words[M::tiles];
    load(at, words);
    for (; tiles >= M::tiles; tiles -= M::tiles) {
      const int stage = ring.stage;
      const uint64_t x = describe_rows(shared + M::stages_at + stage * M::stage_bytes);
      multiply_steps(words[0], 0, x, a[0], sums, add);
      wait_products<1>();  // the other group's registers are free
      release(last);
      constexpr int second = M::tiles - 1;
      multiply_steps(words[second], steps % 4, x + second * (M::x_tile_bytes / 16), a[1], sums, add);
      ring.next();
      at += M::tiles;
      if (tiles > M::tiles) load(at, words);
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
  /// The lane's words of the stage at hand, from tile `at` on, as soon as it is full.
  __device__ __forceinline__ void load(int at, typename Weights::Words (&words)[M::tiles]) const {
    wait_barrier(M::full(shared, ring.stage), ring.parity);
#pragma unroll
    for (int tile = 0; tile < M::tiles; ++tile) decoder.load(ring.stage * M::stage_bytes, tile, at + tile, words[tile]);
  }
  __device__ void release(int stage) const {
    if (stage >= 0 && threadIdx.x % 32 == 0) arrive(M::empty(shared, stage));
  }
};

/// This block's share of the activations, by the warps that multiply.
template <class Weights, int rows>
__device__ __forceinline__ void make_share(const Task<Weights>& task, int warp) {
  device::wait_grid_dependency();
  const auto blocks = static_cast<int>(gridDim.x);
  Weights::template make_inputs<rows>(task.weights, static_cast<int>(blockIdx.x) + blocks * warp,
                                      blocks * (Crew<rows>::consumers / 32));
  order_before_copies();
  named_barrier<Crew<rows>::consumers>();
  if (threadIdx.x == 0) frame::arrive(task.weights.inputs.barrier);
}
/// Until all blocks' shares may be copied; all lanes of a warp.
template <class Weights, int rows>
__device__ __forceinline__ void await_made_inputs(const Task<Weights>& task, bool leader) {
  device::wait_grid_dependency();
  if (__any_sync(0xFFFFFFFFu, leader && !frame::wait_for_arrivals(task.weights.inputs.barrier)) != 0) {
    Weights::template make_inputs<rows>(task.weights, 0, 1);
    order_before_copies();
    __syncwarp();
  }
  order_before_copies();
}

/// What the warps do that multiply nothing: all help with the table, the first two fetch.
template <class Weights, int rows>
__device__ __forceinline__ void fetch_jobs(const Task<Weights>& task, char* memory, int sharers, int warp) {
  using M = Memory<Weights, rows>;
  constexpr int first_warp = Crew<rows>::consumers / 32;
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
  Fetcher<Weights, rows, false> activations(task, shared, sharers);
  if constexpr (Weights::makes_inputs) {
    await_made_inputs<Weights, rows>(task, leader);
    activations.run(leader);
    if (leader) {
      uint32_t* const barrier = task.weights.inputs.barrier;
      frame::empty_if_last(barrier, frame::leave(barrier));
    }
  } else {
    if (leader && task.x == nullptr) prefetch_map(&task.x_map);
    device::wait_grid_dependency();
    activations.run(leader);
  }
}

template <class Weights, int rows>
__global__ void __launch_bounds__(Crew<rows>::threads, 1)
    wgmma_kernel(const __grid_constant__ Task<Weights> task, const int sharers) {
  using M = Memory<Weights, rows>;
  using C = Crew<rows>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  device::trigger_dependent_launch();
  if (warp >= C::consumers / 32) {
    give_registers<C::fetcher_registers>();
    fetch_jobs<Weights, rows>(task, memory, sharers, warp);
    return;
  }
  take_registers<C::consumer_registers>();
  if constexpr (Weights::makes_inputs) make_share<Weights, rows>(task, warp);
  Weights::fill_table(memory, task.weights);
  __syncthreads();
  Multiplier<Weights, rows> multiplier{
      shared, {memory, memory + M::stages_at + M::tiles * M::x_tile_bytes, task.weights, warp / 4, warp % 4}, {}};
  for (JobCursor job(task, sharers); job.valid(); job.next()) {
    float sums[rows / 2];
    const int begin = job.begin(task.k_tiles);
    multiplier.run(begin, job.end(task.k_tiles) - begin, sums);
    const Results<Weights, rows> results(task, job.job);
    if (job.shared()) {
      store_shared(results, sums, job, task.exchange, memory + M::turn_at);
    } else {
      results.store_rows(sums, memory + M::turn_at);
    }
  }
}

}  // namespace w4q::kernels::wgmma
