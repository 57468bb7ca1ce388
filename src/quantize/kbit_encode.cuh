// The quantizing kernel. A warp takes 32 blocks of 32 weights at a time, 8 of them in each of 4 rounds:
//
//   round i, lane l = 4·b + q:  weights 8q … 8q+7 of block 8i + b        (16 or 32 bytes of input)
//   scale of block 8q + b:      lane l = 4·b + q                          (one scale a lane, one store of 32 scales)
//   plane word p of block 8i + b: lane 4·b + p, after a 4 × 4 byte transpose among the four lanes of the block
//
// No weight is divided or even widened: the threshold table (quantize/kbit_threshold.h) holds, for every scale, the
// largest values of the weights' own type that still take the lower code. Sixteen-bit weights are compared in pairs.
// The sign of threshold − x is the comparison: the subtraction is exact in its sign for all finite x, and thresholds
// are never -0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/warp.cuh"
#include "formats/e4m4.h"

namespace w4q::quantize::cuda {

constexpr int warp_blocks = 32;  ///< blocks that a warp encodes together
constexpr int rounds = 4;
constexpr int lane_weights = 8;
using device::all_lanes;

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// The sign of each 16-bit half, spread over the half.
__device__ __forceinline__ uint32_t half_signs(uint32_t pair) { return permute(pair, pair, 0xBB99); }

__device__ __forceinline__ uint32_t select(uint32_t mask, uint32_t yes, uint32_t no) {
  return (mask & yes) | (~mask & no);
}

/// What the kernel asks of a type of weights, `words` registers of which hold a lane's 8 weights.
struct F32 {
  using Element = uint32_t;
  static constexpr int words = 8;
  static constexpr uint32_t infinity = 0x7F800000u;
  /// All ones where x > threshold.
  static __device__ __forceinline__ uint32_t above(uint32_t x, uint32_t threshold) {
    const float rest = __fsub_rn(__uint_as_float(threshold), __uint_as_float(x));
    return static_cast<uint32_t>(__float_as_int(rest) >> 31);
  }
  static __device__ __forceinline__ uint32_t magnitude(const uint32_t (&x)[words]) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t word : x) largest = max(largest, word & 0x7FFFFFFFu);
    return largest;
  }
  static __device__ __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits); }
};

template <class Rules>
struct Pairs {
  using Element = uint16_t;
  static constexpr int words = 4;
  static __device__ __forceinline__ uint32_t above(uint32_t x, uint32_t threshold) {
    return half_signs(Rules::minus(threshold, x));
  }
  /// The largest magnitude as bits; a NaN or an infinity among the weights gives one of the two.
  static __device__ __forceinline__ uint32_t magnitude(const uint32_t (&x)[words]) {
    uint32_t largest = x[0] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < words; ++i) largest = Rules::larger(largest, x[i] & 0x7FFF7FFFu);
    return max(largest & 0xFFFFu, largest >> 16);
  }
};

struct Bf16Rules {
  static __device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xBF80BF80u), "r"(a));
    return result;
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};
struct Bf16 : Pairs<Bf16Rules> {
  static constexpr uint32_t infinity = 0x7F80u;
  static __device__ __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
};

struct F16Rules {
  static __device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xBC00BC00u), "r"(a));
    return result;
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};
struct F16 : Pairs<F16Rules> {
  static constexpr uint32_t infinity = 0x7C00u;
  static __device__ __forceinline__ float widen(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

/// What happened to the blocks so far, in GPU memory. Magnitudes are bits of fp32, which order as they do.
struct KbitCounters {
  uint32_t largest;
  uint32_t smallest;               ///< of the non-zero ones; all ones when there is none
  unsigned long long zero_blocks;  ///< all weights zero
  unsigned long long saturated;
  unsigned long long subnormal;
  unsigned long long bad_block;  ///< the first block with a NaN or an infinity; all ones when there is none
};

struct EncodeArguments {
  const void* data;
  int64_t k;
  int64_t stride;      ///< elements from row to row
  int64_t row_blocks;  ///< ceil(k / 32)
  int64_t blocks;      ///< of all rows
  bool flat;           ///< rows of whole blocks without gaps, 16-byte aligned: one array of blocks
  const uint32_t* table;
  uint32_t* codes;
  void* scales;
  bool e4m4;
  float inverse_table_max;  ///< a power of two
  KbitCounters* counters;
  unsigned long long first_block;  ///< number of the first block here, for KbitCounters::bad_block
};

struct LaneScale {
  uint32_t bits;
  bool saturated;
};

/// formats::store_scale; dividing by a power of two and multiplying by its inverse round the same value.
__device__ __forceinline__ LaneScale encode_scale(float absmax, bool e4m4, const EncodeArguments& a) {
  const float scale = __fmul_rn(absmax, a.inverse_table_max);
  if (e4m4) return {formats::e4m4_encode(scale), scale >= 31.5f};
  constexpr uint32_t largest = 0x7BFF;
  const uint32_t half = __half_as_ushort(__float2half_rn(scale));
  return {min(half, largest), half > largest};
}

/// Threshold for bit `Bit` of a code: the higher bits, as masks, choose among the thresholds of that bit.
template <int Bits, int Next, int Index>
__device__ __forceinline__ uint32_t pick(const uint32_t* thresholds, const uint32_t* masks) {
  if constexpr (Next == Bits) {
    return thresholds[Index];
  } else {
    return select(masks[Next], pick<Bits, Next + 1, Index + (1 << Next)>(thresholds, masks),
                  pick<Bits, Next + 1, Index>(thresholds, masks));
  }
}

/// masks[bit]: all ones in the elements of x whose code has that bit.
template <class T, int Bits, int Bit>
__device__ __forceinline__ void find_code(uint32_t x, const uint32_t* thresholds, uint32_t* masks) {
  masks[Bit] = T::above(x, pick<Bits, Bit + 1, (1 << Bit) - 1>(thresholds, masks));
  if constexpr (Bit > 0) find_code<T, Bits, Bit - 1>(x, thresholds, masks);
}

/// The plane bits of a lane's 8 weights: byte p of `low` is plane p, byte 0 of `high` plane 4.
struct PlaneBytes {
  uint32_t low;
  uint32_t high;
};

/// Each sum has the bits of even weights in byte 0 and those of odd ones in byte 2.
__device__ __forceinline__ PlaneBytes merge_halves(const uint32_t (&sums)[5]) {
  const uint32_t first = permute(sums[0], sums[1], 0x6240);
  const uint32_t second = permute(sums[2], sums[3], 0x6240);
  return {permute(first, second, 0x5410) | permute(first, second, 0x7632), (sums[4] | sums[4] >> 16) & 0xFFu};
}

template <class T, int Bits>
__device__ __forceinline__ PlaneBytes encode_lane(const uint32_t (&x)[T::words], const uint32_t* thresholds) {
  uint32_t sums[5] = {};
#pragma unroll
  for (int word = 0; word < T::words; ++word) {
    uint32_t masks[Bits];
    find_code<T, Bits, Bits - 1>(x[word], thresholds, masks);
#pragma unroll
    for (int bit = 0; bit < Bits; ++bit) {
      if constexpr (T::words == 4) {
        sums[bit] |= masks[bit] & (0x00020001u << (2 * word));
      } else {
        sums[bit & 4] |= masks[bit] & (1u << (word + 8 * (bit & 3)));
      }
    }
  }
  if constexpr (T::words == 4) {
    return merge_halves(sums);
  } else {
    return {sums[0], sums[4]};
  }
}

/// The 4 × 4 byte transpose among the lanes of a block: lane q gives the planes of its weights, and gets plane q of
/// all.
__device__ __forceinline__ uint32_t transpose(uint32_t bytes, int lane) {
  const bool odd = (lane & 1) != 0;
  const uint32_t beside = __shfl_xor_sync(all_lanes, bytes, 1);
  const uint32_t halves = permute(bytes, beside, odd ? 0x3715 : 0x6240);
  const bool upper = (lane & 2) != 0;
  const uint32_t across = __shfl_xor_sync(all_lanes, halves, 2);
  return permute(halves, across, upper ? 0x3276 : 0x5410);
}

/// Byte 0 of the four lanes of a block, in all of them.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t byte, int lane) {
  uint32_t word = byte << (8 * (lane & 3));
  word |= __shfl_xor_sync(all_lanes, word, 1);
  return word | __shfl_xor_sync(all_lanes, word, 2);
}

template <int Bits>
__device__ __forceinline__ void store_planes(PlaneBytes bytes, int64_t block, bool exists, const EncodeArguments& a,
                                             int lane) {
  const uint32_t word = transpose(bytes.low, lane);
  const uint32_t last = Bits == 5 ? gather_bytes(bytes.high, lane) : 0;
  if (!exists) return;
  uint32_t* const out = a.codes + block * Bits;
  const int plane = lane & 3;
  if (plane < Bits) out[plane] = word;
  if (Bits == 5 && plane == 0) out[4] = last;
}

/// Largest of the four lanes of each block, for four rounds at once: lane q is left with that of round q.
__device__ __forceinline__ uint32_t block_magnitudes(const uint32_t (&magnitudes)[rounds], int lane) {
  const bool odd = (lane & 1) != 0;
  const bool upper = (lane & 2) != 0;
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t kept = odd ? magnitudes[2 * i + 1] : magnitudes[2 * i];
    const uint32_t given = odd ? magnitudes[2 * i] : magnitudes[2 * i + 1];
    pairs[i] = max(kept, __shfl_xor_sync(all_lanes, given, 1));
  }
  const uint32_t kept = upper ? pairs[1] : pairs[0];
  const uint32_t given = upper ? pairs[0] : pairs[1];
  return max(kept, __shfl_xor_sync(all_lanes, given, 2));
}

template <class T>
__device__ __forceinline__ void load_vectors(const EncodeArguments& a, int64_t block, bool exists, int quarter,
                                             uint32_t (&x)[T::words]) {
  constexpr int vectors = T::words / 4;
  const auto* from = static_cast<const uint4*>(a.data) + (block * 4 + quarter) * vectors;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const uint4 four = exists ? __ldcs(from + i) : make_uint4(0, 0, 0, 0);
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
}

/// Weights of a lane that exist: fewer than 8 at the end of a ragged row.
__device__ __forceinline__ int lane_count(const EncodeArguments& a, int64_t block, int quarter) {
  const int64_t column = block % a.row_blocks * 32 + quarter * lane_weights;
  return static_cast<int>(max(int64_t{0}, min(int64_t{lane_weights}, a.k - column)));
}

template <class T>
__device__ __forceinline__ void load_elements(const EncodeArguments& a, int64_t block, bool exists, int quarter,
                                              uint32_t (&x)[T::words]) {
  using Element = typename T::Element;
  const int64_t start = block / a.row_blocks * a.stride + block % a.row_blocks * 32 + quarter * lane_weights;
  const int count = exists ? lane_count(a, block, quarter) : 0;
  const auto* from = static_cast<const Element*>(a.data) + start;
  constexpr int each = lane_weights / T::words;
#pragma unroll
  for (int i = 0; i < T::words; ++i) {
    x[i] = i * each < count ? from[i * each] : 0;
    if constexpr (each == 2) x[i] |= i * each + 1 < count ? static_cast<uint32_t>(from[i * each + 1]) << 16 : 0;
  }
}

/// Sums of one thread, then of one thread block.
struct Tally {
  uint32_t largest = 0;
  uint32_t smallest = ~0u;
  uint32_t zero_blocks = 0;
  uint32_t saturated = 0;
  uint32_t subnormal = 0;

  __device__ void add(float absmax, LaneScale scale, bool e4m4) {
    const uint32_t magnitude = __float_as_uint(absmax);
    largest = max(largest, magnitude);
    smallest = magnitude != 0 ? min(smallest, magnitude) : smallest;
    zero_blocks += magnitude == 0 ? 1 : 0;
    saturated += scale.saturated ? 1 : 0;
    subnormal += magnitude != 0 && scale.bits < (e4m4 ? 0x10u : 0x0400u) ? 1 : 0;
  }

  /// Called by all threads of the block.
  __device__ void reduce_into(KbitCounters* counters) const {
    __shared__ uint32_t sums[5];
    if (threadIdx.x < 5) sums[threadIdx.x] = threadIdx.x == 1 ? ~0u : 0;
    __syncthreads();
    const uint32_t most = __reduce_max_sync(all_lanes, largest);
    const uint32_t least = __reduce_min_sync(all_lanes, smallest);
    const uint32_t zeros = __reduce_add_sync(all_lanes, zero_blocks);
    const uint32_t high = __reduce_add_sync(all_lanes, saturated);
    const uint32_t low = __reduce_add_sync(all_lanes, subnormal);
    if (threadIdx.x % 32 == 0) {
      atomicMax(&sums[0], most);
      atomicMin(&sums[1], least);
      atomicAdd(&sums[2], zeros);
      atomicAdd(&sums[3], high);
      atomicAdd(&sums[4], low);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    atomicMax(&counters->largest, sums[0]);
    atomicMin(&counters->smallest, sums[1]);
    unsigned long long* const counts[] = {&counters->zero_blocks, &counters->saturated, &counters->subnormal};
    for (int i = 0; i < 3; ++i) {
      if (sums[2 + i] != 0) atomicAdd(counts[i], static_cast<unsigned long long>(sums[2 + i]));
    }
  }
};

/// Scale of the lane's own block, 8q + b: stored, counted; its bits choose the row of the table.
template <class T>
__device__ __forceinline__ uint32_t encode_own_scale(uint32_t magnitude, int64_t block, bool exists, bool e4m4,
                                                     const EncodeArguments& a, Tally& tally) {
  const float absmax = T::widen(magnitude);
  const LaneScale scale = encode_scale(absmax, e4m4, a);
  if (!exists) return scale.bits;
  if (magnitude >= T::infinity) atomicMin(&a.counters->bad_block, a.first_block + static_cast<uint64_t>(block));
  if (e4m4) {
    static_cast<uint8_t*>(a.scales)[block] = static_cast<uint8_t>(scale.bits);
  } else {
    static_cast<uint16_t*>(a.scales)[block] = static_cast<uint16_t>(scale.bits);
  }
  tally.add(absmax, scale, e4m4);
  return scale.bits;
}

/// Words of a row of the threshold table, and of its copy in shared memory: rows there start an odd number of 16-byte
/// columns apart, so that the rows of different blocks rarely meet in a bank.
template <int Bits>
constexpr int row_words = 1 << Bits;
template <int Bits>
constexpr int shared_row_words = Bits == 2 ? row_words<Bits> : row_words<Bits> + 4;

template <int Bits>
__device__ __forceinline__ void load_thresholds(const uint32_t* row, uint32_t (&thresholds)[row_words<Bits>]) {
#pragma unroll
  for (int i = 0; i < row_words<Bits>; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(row + i);
    thresholds[i] = four.x;
    thresholds[i + 1] = four.y;
    thresholds[i + 2] = four.z;
    thresholds[i + 3] = four.w;
  }
}

/// One task of a warp: 32 blocks. `table` has rows `stride` words apart, in shared or in global memory.
template <class T, int Bits, bool Flat>
__device__ __forceinline__ void encode_task(const EncodeArguments& a, int64_t first, const uint32_t* table, int stride,
                                            Tally& tally) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t block = first + lane / 4;
  const int count = static_cast<int>(min(int64_t{warp_blocks}, a.blocks - first));
  const int quarter = lane & 3;
  uint32_t x[rounds][T::words];
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    if (Flat || a.flat) {
      load_vectors<T>(a, block + 8 * i, lane / 4 + 8 * i < count, quarter, x[i]);
    } else {
      load_elements<T>(a, block + 8 * i, lane / 4 + 8 * i < count, quarter, x[i]);
    }
  }
  uint32_t magnitudes[rounds];
#pragma unroll
  for (int i = 0; i < rounds; ++i) magnitudes[i] = T::magnitude(x[i]);
  const uint32_t own = encode_own_scale<T>(block_magnitudes(magnitudes, lane), block + 8 * quarter,
                                           lane / 4 + 8 * quarter < count, Flat || a.e4m4, a, tally);
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const uint32_t scale = __shfl_sync(all_lanes, own, (lane & 28) | i);
    uint32_t thresholds[row_words<Bits>];
    load_thresholds<Bits>(table + scale * static_cast<uint32_t>(stride), thresholds);
    PlaneBytes bytes = encode_lane<T, Bits>(x[i], thresholds);
    if (!Flat && !a.flat) {
      const uint32_t valid = (1u << lane_count(a, block + 8 * i, quarter)) - 1;
      bytes.low &= 0x01010101u * valid;
      bytes.high &= valid;
    }
    store_planes<Bits>(bytes, block + 8 * i, lane / 4 + 8 * i < count, a, lane);
  }
}

constexpr int encode_threads = 512;

/// Registers decide how many thread blocks an SM holds: 64 a thread for the pairs of 2 to 4 bits, more elsewhere.
template <class T, int Bits>
constexpr int encode_residency = T::words == 4 && Bits < 5 ? 2 : 1;

/// Flat: matrices that are one array of blocks, with E4M4 scales, whose 256 rows of thresholds fit in shared memory.
/// Otherwise the table is read through the L1 cache, and rows may have gaps, ragged ends and any alignment.
template <class T, int Bits, bool Flat>
__global__ void __launch_bounds__(encode_threads, encode_residency<T, Bits>) kbit_encode(EncodeArguments a) {
  constexpr int table_rows = 256;
  __shared__ __align__(16) uint32_t shared[Flat ? table_rows * shared_row_words<Bits> : 4];
  if constexpr (Flat) {
    for (int i = threadIdx.x; i < table_rows * row_words<Bits>; i += encode_threads) {
      shared[i / row_words<Bits> * shared_row_words<Bits> + i % row_words<Bits>] = a.table[i];
    }
    __syncthreads();
  }
  Tally tally;
  // The loop is the same for all warps, of which the last ones may find no blocks: shuffles in it need no guard.
  const int64_t stride = int64_t{gridDim.x} * encode_threads;
  for (int64_t start = int64_t{blockIdx.x} * encode_threads; start < a.blocks; start += stride) {
    const int64_t first = start + threadIdx.x / 32 * warp_blocks;
    if constexpr (Flat) {
      encode_task<T, Bits, true>(a, first, shared, shared_row_words<Bits>, tally);
    } else {
      encode_task<T, Bits, false>(a, first, a.table, row_words<Bits>, tally);
    }
  }
  tally.reduce_into(a.counters);
}

}  // namespace w4q::quantize::cuda
