// What a warpgroup kernel does with sums: those of a whole job go from registers to y, those of a team by way of global
// memory.
#pragma once

#include <algorithm>

#include "device/fragment.cuh"
#include "kernels/common/silu.cuh"
#include "kernels/common/store_value.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/task.cuh"
#include "repack/layout_marlin.h"

namespace w4q::kernels::wgmma {

/// A lane's place in the results of a job.
struct Lane {
  int output;  ///< of half 0, in the job; half 1 is 8 further, its up where rows of gates and ups take turns
  int gated;   ///< the output that both make there
  int row;     ///< of element 0 of the first group of eight
  __device__ Lane()
      : output(static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        gated(static_cast<int>(threadIdx.x) / 32 * 8 + static_cast<int>(threadIdx.x) % 32 / 4),
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
  int first_stored, stored;  ///< outputs as they stand in y: half as many where they are gated

  __device__ Results(const Task<Weights>& task_, int job)
      : task(task_),
        first_output(job / task_.row_tiles * job_outputs(rows)),
        first_row(job % task_.row_tiles * rows),
        first_stored(task_.swiglu ? first_output / 2 : first_output),
        stored(task_.swiglu ? task_.n / 2 : task_.n) {}

  /// What a sum of an output is multiplied with, and what is added.
  __device__ float2 scale_and_bias(int output) const {
    const int at = first_output + output;
    if (at >= task.n) return make_float2(0, 0);
    float scale = task.result_factor;
    if (task.output_scales != nullptr) {
      const int place = task.output_scales_in_order ? at : repack::MarlinMap::single_order(at);
      const auto bits = static_cast<const unsigned short*>(task.output_scales)[place];
      scale *= task.bf16_output_scales ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                       : __half2float(__ushort_as_half(bits));
    }
    if (task.output_factors != nullptr) scale *= task.output_factors[at];
    return make_float2(scale, task.bias != nullptr ? task.bias[at] : 0);
  }
  __device__ int64_t at(int output, int row) const { return (first_row + row) * task.ldy + first_stored + output; }
  __device__ bool inside(int output, int row) const {
    return first_stored + output < stored && first_row + row < task.m;
  }
  __device__ void store(int output, int row, float value) const {
    if (inside(output, row)) store_value<Type>(task.y, task.residual, task.fp32, at(output, row), value);
  }

  /// Sums of rows `first` up to `end` of the job, multiples of 16, turned in `turn` so that a lane has eight
  /// neighbouring outputs.
  template <int first = 0, int end = rows>
  __device__ void store_rows(const float (&sums)[rows / 2], char* turn) const {
    const Lane lane;
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
    const float2 by[2] = {scale_and_bias(lane.output), scale_and_bias(lane.output + 8)};
    if (task.fp32) return store_floats<first, end>(sums, by, reinterpret_cast<float*>(turn + warp * 1024));
    char* const mine = turn + warp * 1024;
    if (task.swiglu) return store_swiglu_rows<first, end>(sums, by, mine);
#pragma unroll
    for (int j = first / 8; j < end / 8; j += 2) {
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

  /// silu(gate) · up of sums
  __device__ static float gate(float gate_sum, float up_sum, const float2 (&by)[2]) {
    return silu_product(gate_sum * by[0].x + by[0].y, up_sum * by[1].x + by[1].y);
  }

 private:
  /// Four groups of eight rows at a time, eight outputs of a warp.
  template <int first, int end>
  __device__ void store_swiglu_rows(const float (&sums)[rows / 2], const float2 (&by)[2], char* turn) const {
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
#pragma unroll
    for (int j = first / 8; j < end / 8; j += 4) {
      char* const half = turn + j / 4 % 2 * 512;
      uint32_t pairs[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (j + i >= end / 8) continue;
        const float* const of = sums + 4 * (j + i);
        pairs[i] = Type::pack(gate(of[0], of[2], by), gate(of[1], of[3], by));
      }
      store_transposed(shared_address(half) + id * 16, pairs);
      __syncwarp();
      if (8 * j + id < end) store_eight(warp * 8, 8 * j + id, *reinterpret_cast<const uint4*>(half + id * 16));
    }
  }

  /// Where a value of sixteen rows and outputs stands on its way: fours of a row in an order that spreads over banks.
  __device__ static int turned(int row, int output) { return row * 16 + (output ^ row / 2 % 4 * 4); }

  template <int first, int end>
  __device__ void store_floats(const float (&sums)[rows / 2], const float2 (&by)[2], float* turn) const {
    const int warp = threadIdx.x / 32;
    const int id = threadIdx.x % 32;
#pragma unroll
    for (int j = first / 8; j < end / 8; j += 2) {
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
    if (!task.wide || first_stored + output + 4 > stored) {
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
    if (task.wide && first_stored + output + 8 <= stored) {
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

/// Adds up the sums of a team of two: each block sends half of its rows and keeps the others in registers.
template <int rank, class Weights, int rows>
__device__ __forceinline__ void store_half(const Results<Weights, rows>& results, float (&sums)[rows / 2],
                                           MailboxPair* shares, char* turn) {
  constexpr int pairs = rows / 8;  // of a half
  constexpr int64_t share = int64_t{2 * pairs} * Crew<rows>::consumers;
  constexpr int mine = rank * pairs, others = pairs - mine;
#pragma unroll
  for (int i = 0; i < pairs; ++i) {
    const int pair = others + i;
    send(shares + rank * share + pair * Crew<rows>::consumers, sums[2 * pair], sums[2 * pair + 1]);
  }
  constexpr int at_once = std::min(pairs, 8);
#pragma unroll
  for (int first = mine; first < mine + pairs; first += at_once) {
    receive<at_once, 1>(shares + (1 - rank) * share + first * Crew<rows>::consumers, 0, 1, Crew<rows>::consumers,
                        at_once, [&](int i, float2 other) {
                          sums[2 * (first + i)] += other.x;
                          sums[2 * (first + i) + 1] += other.y;
                        });
  }
  results.template store_rows<rank * rows / 2, (rank + 1) * rows / 2>(sums, turn);
}

/// The same as below of gates and their ups, which are dealt together.
template <class Weights, int rows>
__device__ __forceinline__ void store_swiglu_share(const Results<Weights, rows>& results, const Lane& lane,
                                                   const float2 (&by)[2], const JobCursor& job, MailboxPair* shares) {
  constexpr int groups = rows / 8;  // of a pair of gates and one of ups
  const int64_t share = int64_t{2 * groups} * Crew<rows>::consumers;
  const int each = (groups + job.sharers - 1) / job.sharers;
  const int stop = min(groups, (job.rank + 1) * each);
  for (int group = job.rank * each; group < stop; ++group) {
    float2 gates = make_float2(0, 0);
    receive<2, most_sharers>(shares + 2 * group * Crew<rows>::consumers, share, job.sharers, Crew<rows>::consumers, 2,
                             [&](int i, float2 total) {
                               if (i == 0) {
                                 gates = total;
                                 return;
                               }
                               const int row = 8 * group + lane.row;
                               results.store(lane.gated, row, results.gate(gates.x, total.x, by));
                               results.store(lane.gated, row + 1, results.gate(gates.y, total.y, by));
                             });
  }
}

/// Adds up the sums of a team: pairs of sums are dealt to its blocks, each collects all shares of its own, adds them in
/// the order of the blocks and stores the results. Whoever waits needs one trip to the L2 cache and no fence. Teams are
/// neighbours: blocks begin in their order, so that at most one team of a launch waits for blocks that have not begun.
template <class Weights, int rows>
__device__ __forceinline__ void store_shared(const Results<Weights, rows>& results, float (&sums)[rows / 2],
                                             const JobCursor& job, MailboxPair* exchange, char* turn) {
  constexpr int pairs = rows / 4;
  const int64_t share = int64_t{pairs} * Crew<rows>::consumers;
  MailboxPair* const shares = exchange + job.exchange() * share + threadIdx.x;
  if constexpr (rows >= 32) {
    if (job.sharers == 2) {
      if (job.rank == 0) {
        store_half<0>(results, sums, shares, turn);
      } else {
        store_half<1>(results, sums, shares, turn);
      }
      return;
    }
  }
  const Lane lane;
  const float2 by[2] = {results.scale_and_bias(lane.output), results.scale_and_bias(lane.output + 8)};
#pragma unroll
  for (int pair = 0; pair < pairs; ++pair) {
    send(shares + job.rank * share + pair * Crew<rows>::consumers, sums[2 * pair], sums[2 * pair + 1]);
  }
  if (results.task.swiglu) return store_swiglu_share(results, lane, by, job, shares);
  const int each = (pairs + job.sharers - 1) / job.sharers;
  const int stop = min(pairs, (job.rank + 1) * each);
  // Many words at once: a trip to the L2 cache takes as long as some hundred instructions.
  constexpr int at_once = pairs < 8 ? 1 : 2;
  for (int pair = job.rank * each; pair < stop; pair += at_once) {
    receive<at_once, most_sharers>(shares + pair * Crew<rows>::consumers, share, job.sharers, Crew<rows>::consumers,
                                   stop - pair, [&](int i, float2 total) {
                                     const int half = (pair + i) % 2;
                                     const int row = (pair + i) / 2 * 8 + lane.row;
                                     const float2 scale = by[half];
                                     results.store(lane.output + 8 * half, row, total.x * scale.x + scale.y);
                                     results.store(lane.output + 8 * half, row + 1, total.y * scale.x + scale.y);
                                   });
  }
}

}  // namespace w4q::kernels::wgmma
