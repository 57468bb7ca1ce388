// One row of activations as the GEMV of units multiplies it: the B operands of mma.m16n8k32 over bytes, in shared memory.
//
// Four warps work on a strip, each on a quarter of k: rows 2·w and 2·w + 1 of B are the two terms of the inputs of warp
// w, each four times, and what the other rows leave in a warp's sums nobody reads. A *unit* is what a warp multiplies at a
// time: half a tile, 32 inputs of each quarter, 1 KB as two times four B registers of a lane, those of two steps. All terms of a block have one
// scale, so that sums are whole numbers from the first unit to the last.
#pragma once

#include "kernels/trellis/inputs.cuh"
#include "kernels/trellis/units.cuh"

namespace w4q::kernels::trellis {

constexpr int quarters = 4;
constexpr int unit_bytes = 1024 + 64;  ///< two units that a warp writes together stand in different banks
constexpr int unit_piece_bytes = piece_units * (unit_bytes + quarters * static_cast<int>(sizeof(int)));

/// Units of a quarter: k is a multiple of 1024.
__host__ __device__ inline int quarter_units(int64_t k) { return static_cast<int>(k / 128); }

/// Shared memory: B of the units, then [unit][quarter] sums of terms.
struct StagedUnits {
  char* units;
  int* sums;

  __device__ StagedUnits(char* memory, const UnitPieces& pieces)
      : units(memory), sums(reinterpret_cast<int*>(memory + pieces.count() * piece_units * unit_bytes)) {}

  /// Terms of a lane's eight inputs of piece `piece` of a quarter.
  __device__ __forceinline__ void put(int piece, int quarter, const uint4& halves, float to_terms) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 8 / 2;
    const int unit = piece * piece_units + lane / 8 * 2 + lane % 2;
    float x[8];
    InputStager::widen(halves, x);
    char* const to = units + unit * unit_bytes + 16 * (8 * quarter + t);
    int sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t first[4], second[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Terms terms(x[4 * half + j] * to_terms);
        first[j] = terms.first.bytes();
        second[j] = terms.second.bytes();
        sum += terms.first.whole() * 65536 + terms.second.whole();
      }
      *reinterpret_cast<uint4*>(to + 512 * half) = make_uint4(first[0], first[1], first[2], first[3]);
      *reinterpret_cast<uint4*>(to + 512 * half + 64) = make_uint4(second[0], second[1], second[2], second[3]);
    }
#pragma unroll
    for (int step = 2; step < 8; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);  // over lanes t
    if (t == 0) sums[unit * quarters + quarter] = sum;
  }

  /// Sums of the first and of the second terms of units [begin, end) of a quarter, by a warp.
  __device__ __forceinline__ int2 sums_of(const UnitPieces& pieces, int begin, int end, int quarter) const {
    int first = 0, second = 0;
#pragma unroll 1
    for (int unit = begin + static_cast<int>(threadIdx.x) % 32; unit < end; unit += 32) {
      const int both = sums[pieces.place(unit) * quarters + quarter];
      const int low = static_cast<short>(both & 0xFFFF);
      first += (both - low) >> 16;
      second += low;
    }
    return {__reduce_add_sync(0xFFFFFFFFu, first), __reduce_add_sync(0xFFFFFFFFu, second)};
  }
};

/// The largest absolute value of eight f16, as its bits: these have the order of integers, NaN above all.
__device__ __forceinline__ uint32_t largest_bits(const uint4& halves) {
  constexpr uint32_t absolute = 0x7FFF7FFFu;
  const uint32_t most =
      __vmaxu2(__vmaxu2(halves.x & absolute, halves.y & absolute), __vmaxu2(halves.z & absolute, halves.w & absolute));
  return max(most & 0xFFFF, most >> 16);
}

/// Bytes of rotated inputs that wait for the largest of the block.
constexpr int waiting_piece_bytes = quarters * piece_inputs * 2;

/// Stages the inputs of a block of `warps` warps. One copy of each step, in loops: what a block runs once it fetches as
/// it runs.
template <int warps>
class UnitStager {
 public:
  __device__ __forceinline__ UnitStager(const TrellisLaunch& args, const UnitPieces& pieces)
      : stager_(args),
        pieces_(pieces),
        quarter_inputs_(static_cast<int>(args.k / quarters)),
        tasks_(quarters * pieces.count()),
        warp_(frame::warp_index()),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Before the wait for the launch before.
  __device__ __forceinline__ void prefetch() const {
#pragma unroll 1
    for (int task = warp_; task < tasks_; task += warps) stager_.prefetch_signs(column(task));
  }
  /// By all warps; ends behind a barrier. `largest` [warps], `waiting` [pieces] of waiting_piece_bytes. Returns the scale
  /// of the terms.
  __device__ __forceinline__ float run(const StagedUnits& staged, uint32_t* largest, char* waiting) const {
    uint32_t most = 0;
#pragma unroll 1
    for (int task = warp_; task < tasks_; task += warps) {
      const uint4 eight = stager_.rotated(column(task));
      *place(waiting, task) = eight;  // for this lane
      most = max(most, largest_bits(eight));
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (lane_ == 0) largest[warp_] = most;
    __syncthreads();
    most = __reduce_max_sync(0xFFFFFFFFu, lane_ < warps ? largest[lane_] : 0);
    const float of_all = __half2float(__ushort_as_half(static_cast<unsigned short>(most)));
    const float to_terms = of_all > 0 ? largest_term / of_all : 0.0f;
#pragma unroll 1
    for (int task = warp_; task < tasks_; task += warps) {
      staged.put(task / quarters, task % quarters, *place(waiting, task), to_terms);
    }
    __syncthreads();
    return term_scale(of_all);
  }

 private:
  __device__ __forceinline__ int column(int task) const {
    return task % quarters * quarter_inputs_ + piece_inputs * pieces_.piece(task / quarters) + 8 * lane_;
  }
  __device__ __forceinline__ uint4* place(char* waiting, int task) const {
    return reinterpret_cast<uint4*>(waiting) + 32 * task + lane_;
  }

  const InputStager stager_;
  const UnitPieces& pieces_;
  const int quarter_inputs_, tasks_, warp_, lane_;
};

}  // namespace w4q::kernels::trellis
