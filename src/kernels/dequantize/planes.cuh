// Decoding layouts that keep the plane words of a block together: canonical and kbit-tile.
//
// A warp decodes 128 neighbouring blocks of a row, 8 of them in each round. Lane 4·b + q owns weights 8q
// … 8q + 7 of block 8i + b: it loads plane word q, gets byte q of the planes 0 … 3 by a 4 × 4 byte transpose among the
// four lanes of the block, and turns the four bytes into four bytes of two codes each by two delta swaps of bits: byte
// j is the index of the pair of weights (j, j + 4). Plane 4 comes as a byte of its own.
#pragma once

#include "kernels/dequantize/pairs.cuh"

namespace w4q::kernels::dequantizing {

constexpr int rounds = 16;
constexpr int warp_blocks = 8 * rounds;

/// Where the blocks of a row stand.
struct CanonicalMap {
  int64_t blocks;
  __device__ int64_t slot(int64_t row, int64_t block) const { return row * blocks + block; }
};

template <class Map>
struct PlaneArguments {
  Map map;
  const uint32_t* codes;
  const void* scales;
  const float* codebook;
  bool e4m4;
  int64_t blocks;  ///< of a row
  OutputRows out;
};

/// Lane q of four gives word q and gets byte q of the four words.
__device__ __forceinline__ uint32_t transpose(uint32_t word, int lane) {
  const uint32_t beside = __shfl_xor_sync(all_lanes, word, 1);
  const uint32_t halves = __byte_perm(word, beside, (lane & 1) != 0 ? 0x3715 : 0x6240);
  const uint32_t across = __shfl_xor_sync(all_lanes, halves, 2);
  return __byte_perm(halves, across, (lane & 2) != 0 ? 0x3276 : 0x5410);
}

/// Exchanges bits whose index has bit a = 0, bit b = 1 with those that have a = 1, b = 0; shift = 2^a − 2^b.
__device__ __forceinline__ uint32_t delta_swap(uint32_t x, int shift, uint32_t mask) {
  const uint32_t differ = ((x >> shift) ^ x) & mask;
  return x ^ differ ^ (differ << shift);
}

/// Bit j of byte p goes to bit p of the low nibble of byte j, bit j + 4 to that of its high nibble.
__device__ __forceinline__ uint32_t pairs_of_planes(uint32_t bytes) {
  return delta_swap(delta_swap(bytes, 14, 0x0000CCCCu), 7, 0x00AA00AAu);
}

/// In each byte, bits j and j + 4 go to bits 2j and 2j + 1.
__device__ __forceinline__ uint32_t interleave_halves(uint32_t bytes) {
  return delta_swap(delta_swap(bytes, 2, 0x0C0C0C0Cu), 1, 0x22222222u);
}

/// Table indices: the pair byte, and for 5 bits the fifth bits of the two codes above it.
template <int bits>
struct PlaneIndex {
  static constexpr int index_bits = bits == 5 ? 10 : 4 + bits;
  using Table = PairTable<index_bits>;

  static __device__ int2 codes_of(int entry) {
    return make_int2((entry & 15) | (entry >> 8 & 1) << 4, (entry >> 4 & 15) | (entry >> 9 & 1) << 4);
  }
  /// Byte offset of pair j of a round, whose fifth bits stand in byte `round` of `fifths`.
  static __device__ uint32_t offset(uint32_t pairs, uint32_t fifths, int round, int j, uint32_t lane_offset) {
    if constexpr (bits < 5) {
      return (Table::aligned(pairs, 8 * j) & Table::index_mask) | lane_offset;
    } else {
      constexpr uint32_t low = 0xFFu << Table::entry_shift;
      const int fifth_at = 8 * round + 2 * j - 8;  // of the index they are bits 8 and 9
      const uint32_t fifth = fifth_at <= Table::entry_shift ? fifths << (Table::entry_shift - fifth_at)
                                                            : fifths >> (fifth_at - Table::entry_shift);
      return (Table::aligned(pairs, 8 * j) & low) | (fifth & (Table::index_mask & ~low)) | lane_offset;
    }
  }
};

/// What a lane loads, before anything waits for it. Four rounds share a scale register: lane 4·b + q loads the scale of
/// block 8·(4j + q) + b for the rounds from 4j on.
template <int bits>
struct PlaneWords {
  static constexpr int fours = rounds / 4;
  uint32_t words[rounds];
  uint32_t fifths[rounds];
  uint32_t scales[fours];  ///< as they stand

  template <class Map>
  __device__ void load(const PlaneArguments<Map>& a, int64_t row, int64_t block, int lane) {
    if (row >= a.out.n) block = a.blocks;
    const int q = lane & 3;
    const int64_t first = block + lane / 4;
    const int left = static_cast<int>(a.blocks - first);
    const int64_t slot = a.map.slot(row, first);
    const int64_t step = a.map.slot(0, 8);  // both maps are linear in steps of 8 blocks
    const uint32_t* const planes = a.codes + slot * bits;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const uint32_t* const plane = planes + i * step * bits;
      words[i] = 8 * i < left && q < bits ? __ldcs(plane + q) : 0;
      if constexpr (bits == 5) fifths[i] = 8 * i < left ? reinterpret_cast<const uint8_t*>(plane + 4)[q] : 0;
    }
#pragma unroll
    for (int j = 0; j < fours; ++j) {
      const int64_t own = slot + (4 * j + q) * step;
      scales[j] = 0;
      if (8 * (4 * j + q) < left) {
        scales[j] = a.e4m4 ? static_cast<const uint8_t*>(a.scales)[own] : static_cast<const uint16_t*>(a.scales)[own];
      }
    }
  }

  /// Fifth bits of four rounds, a byte each, those of a pair next to each other.
  __device__ uint32_t fifths_of(int four) const {
    if constexpr (bits < 5) return 0;
    const uint32_t low = __byte_perm(fifths[4 * four], fifths[4 * four + 1], 0x0040);
    const uint32_t high = __byte_perm(fifths[4 * four + 2], fifths[4 * four + 3], 0x0040);
    return interleave_halves(__byte_perm(low, high, 0x5410));
  }
};

template <class T, int bits, class Map>
__device__ __forceinline__ void decode_planes(const PlaneArguments<Map>& a, const PlaneWords<bits>& loaded, int64_t row,
                                              int64_t block, const float2* table, int lane) {
  using Index = PlaneIndex<bits>;
  const uint32_t lane_offset = Index::Table::lane_offset(lane);
  const int64_t column = block * 32 + 8 * lane;
  const int left = a.out.left(row, column);
  T* const to = static_cast<T*>(a.out.data) + row * a.out.stride + column;
#pragma unroll
  for (int four = 0; four < PlaneWords<bits>::fours; ++four) {
    if (block + 32 * four >= a.blocks) break;
    const float scales = scale_value(loaded.scales[four], a.e4m4);
    const uint32_t fifths = loaded.fifths_of(four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int round = 4 * four + i;
      const uint32_t pairs = pairs_of_planes(transpose(loaded.words[round], lane));
      const float scale = __shfl_sync(all_lanes, scales, (lane & 28) | i);
      float values[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = Index::Table::at(table, Index::offset(pairs, fifths, i, j, lane_offset));
        values[j] = __fmul_rn(pair.x, scale);
        values[j + 4] = __fmul_rn(pair.y, scale);
      }
      store_eight(to + 256 * round, left - 256 * round, a.out.vectors, values, lane);
    }
  }
}

/// A thread block takes as many neighbouring rows as it has warps: in kbit-tile they share sectors.
template <class T, int bits, class Map>
__global__ void __launch_bounds__(block_threads, residency) dequantize_planes(PlaneArguments<Map> a) {
  extern __shared__ float2 table[];
  using Index = PlaneIndex<bits>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t groups = (a.blocks + warp_blocks - 1) / warp_blocks;
  const int64_t row = blockIdx.x / groups * block_warps + threadIdx.x / 32;
  const int64_t block = blockIdx.x % groups * warp_blocks;
  PlaneWords<bits> loaded;
  loaded.load(a, row, block, lane);
  Index::Table::fill(table, a.codebook[lane & ((1 << bits) - 1)], Index::codes_of);
  __syncthreads();
  decode_planes<T, bits>(a, loaded, row, block, table, lane);
}

}  // namespace w4q::kernels::dequantizing
