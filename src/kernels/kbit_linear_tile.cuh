// The pieces of the kbit main loop, load / dequant / mma / store, each its own small device struct.
#pragma once

#include <type_traits>

#include "device/fragment.cuh"
#include "repack/layout_kbit_fragment.h"

namespace w4q::kernels::kbit {

using Map = repack::KbitFragmentMap;

/// How the table of value pairs stands in shared memory: entry · copies + lane-dependent copy, so that the 32 lanes of
/// a warp look up 32 banks (copies = 32) or at most two of 16 (5 bits, whose table would not fit otherwise).
template <int bits>
struct PairTable {
  static constexpr int entries = 1 << (2 * bits);
  static constexpr int copies = bits == 5 ? 16 : 32;
  static constexpr int entry_bytes = 4 * copies;
  static constexpr int entry_shift = bits == 5 ? 6 : 7;
  static constexpr int total_bytes = entries * entry_bytes;
  static constexpr uint32_t index_mask = (entries - 1u) << entry_shift;

  /// Byte offset of this lane's copy within an entry.
  __device__ static uint32_t lane_offset() { return (threadIdx.x % 32) * copies / 32 * 4; }

  /// Fills the table from the codebook, times 2^exponent; all warps of the block. Each lane holds one level and gives
  /// it to the others by shuffles, so that only one load waits for memory.
  template <class Type>
  __device__ static void fill(uint32_t* table, const float* codebook, int exponent) {
    constexpr int levels = 1 << bits;
    constexpr int entries_per_step = 32 / copies;
    const int lane = threadIdx.x % 32;
    const float level = ldexpf(codebook[lane % levels], exponent);
    const int stride = blockDim.x / 32 * entries_per_step;
#pragma unroll 4
    for (int first = threadIdx.x / 32 * entries_per_step; first < entries; first += stride) {
      const int entry = first + lane / copies;
      const float low = __shfl_sync(0xFFFFFFFFu, level, entry % levels);
      const float high = __shfl_sync(0xFFFFFFFFu, level, entry / levels);
      table[entry * copies + lane % copies] = Type::pack(low, high);
    }
  }
};

/// One lane's copy of the table. Where the table is aligned to its size, its address and the index have no bit in
/// common and one instruction makes the address of a look-up; otherwise an addition comes on top.
template <int bits, bool aligned>
struct LanePairs {
  uint32_t base;
  uint32_t lane;

  __device__ explicit LanePairs(const uint32_t* table)
      : base(static_cast<uint32_t>(__cvta_generic_to_shared(table))), lane(PairTable<bits>::lane_offset()) {
    if (aligned) lane |= base;
  }

  /// The pair whose index stands in `offset` from bit entry_shift on, whatever is around it.
  __device__ uint32_t look_up(uint32_t offset) const {
    const uint32_t address = device::and_or(offset, PairTable<bits>::index_mask, lane);
    return device::load_shared(aligned ? address : base + address);
  }
};

/// One lane's share of a 64 × 64 tile: codes of 4 row tiles, and the scales of 8 rows.
template <int bits, class Scales>
struct WeightTile {
  uint4 codes[bits];
  typename Scales::Packed scales;

  /// Word w (a compile-time constant after unrolling) of the lane's 4 · bits words.
  __device__ uint32_t word(int w) const {
    const uint4& group = codes[w / 4];
    return w % 4 == 0 ? group.x : w % 4 == 1 ? group.y : w % 4 == 2 ? group.z : group.w;
  }

  /// Byte offset in the pair table, without the lane's copy, of pair `pair` of row tile `row_tile`.
  __device__ uint32_t table_offset(int row_tile, int pair) const {
    constexpr int per_word = Map::pairs_per_word(bits);
    constexpr int shift = PairTable<bits>::entry_shift;
    const int first = row_tile * bits;
    if (pair < per_word * bits) {
      const int right = pair % per_word * 2 * bits - shift;
      const uint32_t w = word(first + pair / per_word);
      return right >= 0 ? w >> right : w << -right;
    }
    // The sixteenth pair of 3 and 5 bits: two bits at the top of each word.
    uint32_t index = 0;
    if constexpr (per_word * bits < Map::pairs) {
#pragma unroll
      for (int j = 0; j < bits; ++j) index |= word(first + j) >> (2 * bits * per_word) << (2 * j);
    }
    return index << shift;
  }
};

/// Eight E4M4 scales of a lane: byte 2·row_tile + half. As f16 they read value / 16, as bf16 value · 2^-116, exactly.
struct E4m4Scales {
  using Packed = uint2;
  /// The scale twice, as a pair of the activations' type.
  template <class Type>
  __device__ static uint32_t pair(const Packed& packed, int row_tile, int half) {
    constexpr int shift = std::is_same_v<Type, device::HalfType> ? 6 : 3;
    const uint32_t word = row_tile < 2 ? packed.x : packed.y;
    const int byte = 2 * (row_tile % 2) + half;
    return __byte_perm(word, 0, 0x4040 | byte << 8 | byte) << shift;
  }
};

/// Eight f16 scales of a lane.
struct F16Scales {
  using Packed = uint4;
  template <class Type>
  __device__ static uint32_t pair(const Packed& packed, int row_tile, int half) {
    const uint32_t word = row_tile == 0 ? packed.x : row_tile == 1 ? packed.y : row_tile == 2 ? packed.z : packed.w;
    const uint32_t both = __byte_perm(word, 0, half == 0 ? 0x1010 : 0x3232);
    if constexpr (std::is_same_v<Type, device::HalfType>) return both;
    const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(both)));
    return Type::pack(value, value);
  }
};

/// A lane's way through consecutive tiles: two pointers that advance by constants.
template <int bits, class Scales>
struct WeightStream {
  const uint4* codes;
  const typename Scales::Packed* scales;

  __device__ WeightStream(const uint32_t* all_codes, const void* all_scales, int64_t tile)
      : codes(reinterpret_cast<const uint4*>(all_codes + tile * Map::tile_words(bits)) + threadIdx.x % 32),
        scales(static_cast<const typename Scales::Packed*>(all_scales) + tile * scale_groups + threadIdx.x % 32 / 2) {}

  /// Loads the tile at hand and moves to the one `step` tiles further.
  __device__ void load(WeightTile<bits, Scales>& tile, int step = 1) {
#pragma unroll
    for (int j = 0; j < bits; ++j) tile.codes[j] = device::load_once(codes + j * Map::lanes);
    tile.scales = device::load_once(scales);
    codes += step * bits * Map::lanes;
    scales += step * scale_groups;
  }

 private:
  /// Lane 4·g + t reads group 2·g + t / 2, which is lane / 2.
  static constexpr int scale_groups = static_cast<int>(Map::tile_scales) / 8;
};

/// Eight values that start at `from`, of which `left` exist; one at a time, for rows that are not aligned to 16 bytes
/// and where k ends within a tile.
template <class Scalar>
__device__ inline uint4 load_ragged(const Scalar* from, int left) {
  const auto* values = reinterpret_cast<const unsigned short*>(from);
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = 2 * j < left ? values[2 * j] : 0;
    const uint32_t high = 2 * j + 1 < left ? values[2 * j + 1] : 0;
    words[j] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// One lane's activations of half a tile, two mma steps: for each group of eight rows, 8 neighbours of row g. Half a
/// tile at a time, because 64 rows of a whole one would not fit the registers.
template <int row_groups>
struct ActivationHalf {
  uint4 values[row_groups];

  /// x points to the lane's first column of this half in row 0; rows beyond m repeat the last one, their results are
  /// not stored. `left`: values of a row from there on; vector loads need 8 of them and alignment.
  template <class Scalar>
  __device__ void load(const Scalar* x, int64_t ldx, int m, bool vector_loads, int left) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < row_groups; ++i) {
      const Scalar* row = x + static_cast<int64_t>(min(8 * i + g, m - 1)) * ldx;
      values[i] = vector_loads ? __ldg(reinterpret_cast<const uint4*>(row)) : load_ragged(row, left);
    }
  }

  /// The two B registers of mma step 0 or 1 of the half.
  __device__ uint2 step(int group, int s) const {
    const uint4& v = values[group];
    return s == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
  }
};

/// fp32 sums of 64 outputs × 8 · row_groups activation rows, spread over a warp as mma leaves them.
template <int row_groups>
struct Accumulator {
  float sums[Map::row_tiles][row_groups][4];

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
      for (int i = 0; i < row_groups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[r][i][j] = 0;
      }
    }
  }
};

/// Decodes half a tile a register at a time and multiplies it with the activations.
template <int half, int bits, class Type, class Scales, int row_groups, bool aligned>
__device__ __forceinline__ void multiply_half(const WeightTile<bits, Scales>& weights,
                                              const ActivationHalf<row_groups>& x,
                                              const LanePairs<bits, aligned>& table, Accumulator<row_groups>& acc) {
#pragma unroll
  for (int row_tile = 0; row_tile < Map::row_tiles; ++row_tile) {
    const uint32_t scale[2] = {Scales::template pair<Type>(weights.scales, row_tile, 0),
                               Scales::template pair<Type>(weights.scales, row_tile, 1)};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        const uint32_t offset = weights.table_offset(row_tile, 8 * half + 4 * step + reg);
        const uint32_t values = table.look_up(offset);
        a[reg] = Type::multiply(values, scale[reg % 2]);
      }
#pragma unroll
      for (int i = 0; i < row_groups; ++i) {
        const uint2 b = x.step(i, step);
        Type::mma(acc.sums[row_tile][i], a, b.x, b.y);
      }
    }
  }
}

}  // namespace w4q::kernels::kbit
