// The main loop of the warpgroup kernels: y = x · Wᵀ + b for 17 and more activation rows on sm_90a.
//
// A block has four warpgroups, 64 outputs each, and one warp that fetches: weights as they are stored and arranged
// activations (wgmma_arrange.h) come by bulk copies into a ring of stages in shared memory. A warp decodes its sixteen
// outputs of a tile to registers of A while the products of the registers before run, so that decoding costs no time
// of the tensor cores. Which blocks do what is the host's plan (wgmma_plan.h).
#pragma once

#include "device/fragment.cuh"
#include "kernels/store_value.cuh"
#include "kernels/wgmma_instruction.cuh"
#include "kernels/wgmma_pipeline.cuh"
#include "kernels/wgmma_plan.h"

namespace w4q::kernels::wgmma {

constexpr int warpgroups = job_outputs / 64;
constexpr int consumers = warpgroups * 128;
constexpr int threads = consumers + 128;  ///< one of the last four warps fetches
// A block starts with the registers of `threads` threads, which its warps divide among themselves afterwards.
constexpr int start_registers = 65536 / threads / 8 * 8;
constexpr int fetcher_registers = 32;
constexpr int consumer_registers = 112;
static_assert(consumers * consumer_registers + 128 * fetcher_registers <= threads * start_registers);
constexpr int most_shared_bytes = 227 * 1024;

/// What a launch needs, resolved on the host.
template <class Weights>
struct Task {
  typename Weights::Source weights;
  const char* x;              ///< arranged
  const float* bias;          ///< [n], or null
  const void* residual;       ///< added to the result: of the type and strides of y, or null
  const void* output_scales;  ///< one per output, in Marlin's order of a single group, or null
  bool bf16_output_scales;
  void* y;
  int64_t ldy;
  int m, n;
  int k_tiles, row_tiles;
  int jobs, whole_rounds;
  float result_factor;
  bool fp32;  ///< y and the residual are f32
  bool wide;  ///< rows of y, and of the residual, may be accessed 16 bytes at a time
};

/// Shared memory of a block: table, stages, room to turn results in, barriers.
template <class Weights, int rows>
struct Memory {
  static constexpr int tiles = rows <= 64 ? 2 : 1;  ///< of 64 inputs in a stage
  static constexpr int x_tile_bytes = rows * 128;
  static constexpr int stage_bytes = tiles * x_tile_bytes + Weights::stage_bytes(tiles);
  static constexpr int turn_bytes = consumers / 32 * 1024;
  static constexpr int barrier_bytes = 256;
  static constexpr int room = most_shared_bytes - Weights::table_bytes - turn_bytes - barrier_bytes;
  static constexpr int stages = room / stage_bytes < 8 ? room / stage_bytes : 8;
  static constexpr int stages_at = Weights::table_bytes;
  static constexpr int turn_at = stages_at + stages * stage_bytes;
  static constexpr int barriers_at = turn_at + turn_bytes;
  static constexpr int bytes = barriers_at + barrier_bytes;
  static constexpr int scratch_bytes = stages * stage_bytes + turn_bytes;  ///< for the exchange of sums
  static_assert(stages >= 2 && stage_bytes % 1024 == 0 && stages_at % 1024 == 0);

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
  int sharers, rank, cluster, clusters, jobs;

  template <class Weights>
  __device__ explicit JobCursor(const Task<Weights>& task, int sharers_)
      : left(task.whole_rounds),
        sharers(sharers_),
        rank(static_cast<int>(blockIdx.x) % sharers_),
        cluster(static_cast<int>(blockIdx.x) / sharers_),
        clusters(static_cast<int>(gridDim.x) / sharers_),
        jobs(task.jobs) {
    job = left > 0 ? static_cast<int>(blockIdx.x) : cluster;
  }
  __device__ bool valid() const { return job < jobs; }
  __device__ bool shared() const { return left == 0 && sharers > 1; }
  __device__ void next() {
    if (left == 0) {
      job += clusters;
    } else {
      --left;
      job +=
          left > 0 ? static_cast<int>(gridDim.x) : static_cast<int>(gridDim.x) - static_cast<int>(blockIdx.x) + cluster;
    }
  }
  /// The block's tiles along k.
  __device__ int begin(int k_tiles) const { return shared() ? rank * k_tiles / sharers : 0; }
  __device__ int end(int k_tiles) const { return shared() ? (rank + 1) * k_tiles / sharers : k_tiles; }
};

/// All warps that multiply, and the one that fetches.
__device__ __forceinline__ void meet_block() { asm volatile("bar.sync 1, %0;" ::"n"(consumers + 32) : "memory"); }

/// The fetching warp's way through the stages of all jobs.
template <class Weights, int rows>
struct Fetcher {
  using M = Memory<Weights, rows>;
  const Task<Weights>& task;
  const uint32_t shared;
  JobCursor job;
  Ring<M::stages> ring;
  int tile, end;
  int stages_of_job = 0;

  __device__ Fetcher(const Task<Weights>& task_, uint32_t shared_, int sharers)
      : task(task_), shared(shared_), job(task_, sharers) {
    enter();
  }
  __device__ void enter() {
    tile = job.begin(task.k_tiles);
    end = job.end(task.k_tiles);
  }
  __device__ int count() const { return min(M::tiles, end - tile); }
  __device__ int strip() const { return job.job / task.row_tiles; }
  __device__ uint32_t stage() const { return shared + M::stages_at + ring.stage * M::stage_bytes; }

  __device__ void fetch_weights() const {
    const uint32_t full = M::full(shared, ring.stage);
    const uint32_t bytes = count() * M::x_tile_bytes + Weights::bytes(task.weights, strip(), tile, count());
    if (threadIdx.x % 32 == 0) arrive_and_expect(full, bytes);
    __syncwarp();
    Weights::template fetch<M::tiles>(task.weights, strip(), tile, count(), stage() + M::tiles * M::x_tile_bytes, full);
  }
  __device__ void fetch_x() const {
    if (threadIdx.x % 32 != 31) return;
    const int64_t at = static_cast<int64_t>(job.job % task.row_tiles) * task.k_tiles + tile;
    copy_bulk(stage(), task.x + at * M::x_tile_bytes, count() * M::x_tile_bytes, M::full(shared, ring.stage));
  }
  __device__ void next() {
    tile += M::tiles;
    ring.next();
  }

  /// The stages of the first job that fit, as far as weights go.
  __device__ void begin() {
    while (stages_of_job < M::stages && job.valid() && tile < end) {
      fetch_weights();
      next();
      ++stages_of_job;
    }
  }
  /// Everything else. `first` is where begin() began.
  __device__ void run(Fetcher first) {
    for (int i = 0; i < stages_of_job; ++i, first.next()) first.fetch_x();
    while (job.valid()) {
      for (; tile < end; next()) {
        wait_barrier(M::empty(shared, ring.stage), ring.parity ^ 1);
        fetch_weights();
        fetch_x();
      }
      if (job.shared()) {
        // The stages serve the exchange of sums.
        meet_cluster();
        meet_cluster();
        meet_block();
      }
      job.next();
      if (job.valid()) enter();
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

/// Four values that stand side by side += `values`, without waiting for them.
__device__ __forceinline__ void add_four(float* to, const float4& values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

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
  __device__ int64_t at(int output, int row) const { return (first_row + row) * task.ldy + first_output + output; }
  __device__ bool inside(int output, int row) const {
    return first_output + output < task.n && first_row + row < task.m;
  }
  __device__ void store(int output, int row, float value) const {
    if (inside(output, row)) store_value<Type>(task.y, task.residual, task.fp32, at(output, row), value);
  }

  /// Sums of a whole job, turned in `turn` so that a lane has eight neighbouring outputs.
  __device__ void store_all(const float (&sums)[rows / 2], char* turn) const {
    const Lane lane;
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
    const float2 by[2] = {scale_and_bias(lane.output), scale_and_bias(lane.output + 8)};
    if (task.fp32) return store_floats(sums, by, reinterpret_cast<float*>(turn + warp * 1024));
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
  /// Where a value of sixteen rows and outputs stands on its way: fours of a row in an order that spreads over banks.
  __device__ static int turned(int row, int output) { return row * 16 + (output ^ row / 2 % 4 * 4); }

  __device__ void store_floats(const float (&sums)[rows / 2], const float2 (&by)[2], float* turn) const {
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < rows / 8; j += 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 scale = by[i / 2 % 2];
        turn[turned(i / 4 * 8 + id % 4 * 2 + i % 2, id / 4 + i / 2 % 2 * 8)] = sums[4 * j + i] * scale.x + scale.y;
      }
      __syncwarp();
      const int row = id / 2, output = id % 2 * 8;
      const float4 values[2] = {*reinterpret_cast<const float4*>(turn + turned(row, output)),
                                *reinterpret_cast<const float4*>(turn + turned(row, output + 4))};
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) store_four(warp * 16 + output + 4 * half, 8 * j + row, values[half]);
    }
  }
  /// Four f32 results of a row.
  __device__ void store_four(int output, int row, const float4& values) const {
    if (first_row + row >= task.m) return;
    if (!task.wide || first_output + output + 4 > task.n) {
      const float all[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) store(output + i, row, all[i]);
      return;
    }
    const int64_t to = at(output, row);
    float* const y = static_cast<float*>(task.y) + to;
    if (task.residual == task.y) {
      add_four(y, values);
    } else if (task.residual == nullptr) {
      *reinterpret_cast<float4*>(y) = values;
    } else {
      const float4 more = *reinterpret_cast<const float4*>(static_cast<const float*>(task.residual) + to);
      *reinterpret_cast<float4*>(y) =
          make_float4(values.x + more.x, values.y + more.y, values.z + more.z, values.w + more.w);
    }
  }
  /// 16-bit values and those at `residual`, eight each.
  __device__ static uint4 add_eight(const uint4& values, const void* residual) {
    const uint4 more = *static_cast<const uint4*>(residual);
    return {add_pair(values.x, more.x), add_pair(values.y, more.y), add_pair(values.z, more.z),
            add_pair(values.w, more.w)};
  }
  __device__ static uint32_t add_pair(uint32_t a, uint32_t b) {
    const float2 x = Type::widen_pair(a), y = Type::widen_pair(b);
    return Type::pack(x.x + y.x, x.y + y.y);
  }
  /// Eight results of a row. A residual is added to the 16-bit values.
  __device__ void store_eight(int output, int row, const uint4& values) const {
    if (first_row + row >= task.m) return;
    if (task.wide && first_output + output + 8 <= task.n) {
      const int64_t bytes = 2 * at(output, row);
      const auto* const residual = static_cast<const char*>(task.residual);
      *reinterpret_cast<uint4*>(static_cast<char*>(task.y) + bytes) =
          residual == nullptr ? values : add_eight(values, residual + bytes);
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

/// Adds up the sums of the blocks of a cluster: pairs of sums are dealt to the blocks, each collects all shares of its
/// own in `scratch`, adds them in the order of the blocks and stores the results.
template <class Weights, int rows>
__device__ __forceinline__ void store_shared(const Results<Weights, rows>& results, const float (&sums)[rows / 2],
                                             const JobCursor& job, char* scratch) {
  constexpr int pairs = rows / 4;
  const int each = (pairs + job.sharers - 1) / job.sharers;
  const uint32_t base = shared_address(scratch) + (job.rank * each * consumers + threadIdx.x) * 8;
  meet_cluster();  // all stages have been read
  int owner = 0;
  int local = 0;
#pragma unroll
  for (int pair = 0; pair < pairs; ++pair) {
    store_in_cluster(address_in(base + local * consumers * 8, owner), sums[2 * pair], sums[2 * pair + 1]);
    if (++local == each) {
      local = 0;
      ++owner;
    }
  }
  meet_cluster();
  const Lane lane;
  const float2 by[2] = {results.scale_and_bias(lane.output), results.scale_and_bias(lane.output + 8)};
  const int stop = min(pairs, (job.rank + 1) * each);
  for (int pair = job.rank * each; pair < stop; ++pair) {
    const auto* from = reinterpret_cast<const float2*>(scratch) + (pair - job.rank * each) * consumers + threadIdx.x;
    float2 total = make_float2(0, 0);
    for (int block = 0; block < job.sharers; ++block) {
      const float2 part = from[block * each * consumers];
      total.x += part.x;
      total.y += part.y;
    }
    const int half = pair % 2;
    const int row = pair / 2 * 8 + lane.row;
    const float2 scale = by[half];
    results.store(lane.output + 8 * half, row, total.x * scale.x + scale.y);
    results.store(lane.output + 8 * half, row + 1, total.y * scale.x + scale.y);
  }
  order_before_copies();
  meet_block();
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

  /// The sums over `tiles` tiles from tile `at` on, more than none.
  __device__ __forceinline__ void run(int at, int tiles, float (&sums)[rows / 2]) {
    uint32_t a[2][steps][4];
    int add = 0;
    int last = -1;
#pragma unroll
    for (float& sum : sums) sum = 0;
    for (; tiles >= M::tiles; tiles -= M::tiles, at += M::tiles, ring.next()) {
      wait_barrier(M::full(shared, ring.stage), ring.parity);
      const uint64_t x = describe_rows(shared + M::stages_at + ring.stage * M::stage_bytes);
      typename Weights::Words words[M::tiles];
#pragma unroll
      for (int tile = 0; tile < M::tiles; ++tile) decoder.load(ring.stage * M::stage_bytes, at, tile, words[tile]);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const int tile = M::tiles == 2 ? group : 0;
        multiply_steps(words[tile], group * steps % 4, x + tile * (M::x_tile_bytes / 16), a[group], sums, add);
        wait_products<1>();  // the other group's registers are free
        if (group == 0) release(last);
      }
      last = ring.stage;
    }
    wait_products<0>();
    release(last);
    if (M::tiles == 1 || tiles == 0) return;
    wait_barrier(M::full(shared, ring.stage), ring.parity);
    typename Weights::Words words;
    decoder.load(ring.stage * M::stage_bytes, at, 0, words);
    multiply_steps(words, 0, describe_rows(shared + M::stages_at + ring.stage * M::stage_bytes), a[0], sums, add);
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
  __device__ void release(int stage) const {
    if (stage >= 0 && threadIdx.x % 32 == 0) arrive(M::empty(shared, stage));
  }
};

/// What the warps do that multiply nothing: all help with the table, the first fetches.
template <class Weights, int rows>
__device__ __forceinline__ void fetch_jobs(const Task<Weights>& task, char* memory, int sharers, int warp) {
  using M = Memory<Weights, rows>;
  const uint32_t shared = shared_address(memory);
  Fetcher<Weights, rows> fetcher(task, shared, sharers);
  const Fetcher<Weights, rows> first = fetcher;
  if (warp == consumers / 32) {
    if (threadIdx.x == consumers) {
      for (int stage = 0; stage < M::stages; ++stage) {
        init_barrier(M::full(shared, stage), 1);
        init_barrier(M::empty(shared, stage), consumers / 32);
      }
      publish_barriers();
    }
    __syncwarp();
    fetcher.begin();
  }
  Weights::fill_table(memory, task.weights);
  __syncthreads();
  if (warp != consumers / 32) return;
  device::wait_for_previous_launch();
  fetcher.run(first);
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
    const int begin = job.begin(task.k_tiles);
    multiplier.run(begin, job.end(task.k_tiles) - begin, sums);
    const Results<Weights, rows> results(task, job.job);
    if (job.shared()) {
      store_shared(results, sums, job, memory + M::stages_at);
    } else {
      results.store_all(sums, memory + M::turn_at);
    }
  }
}

}  // namespace w4q::kernels::wgmma
