// The pieces of the kbit main loops that know its weights, load and dequant, each its own small device struct.
#pragma once

#include <type_traits>

#include "kernels/frame/tile.cuh"
#include "kernels/kbit/pair_table.cuh"

namespace w4q::kernels::kbit {

using frame::Map;

/// Sixteen scales of a lane, byte 8·block + 2·row_tile + half. An E4M4 byte shifted into an f16 reads value / 16, into
/// a bf16 value · 2^-116, both exactly.
struct E4m4Scales {
  struct Packed {
    uint4 bytes;
  };
  static constexpr int bytes_per_lane = 16;
  static constexpr float sum_factor = 16;  ///< what pair_of_sums() leaves out

  __device__ static uint32_t word(const Packed& packed, int block, int row_tile) {
    const uint4& v = packed.bytes;
    return block == 0 ? (row_tile < 2 ? v.x : v.y) : (row_tile < 2 ? v.z : v.w);
  }
  /// The scales of half 0 and 1 divided by sum_factor.
  __device__ static float2 pair_of_sums(const Packed& packed, int block, int row_tile) {
    const uint32_t spread = __byte_perm(word(packed, block, row_tile), 0, row_tile % 2 == 0 ? 0x1404 : 0x3424) >> 2;
    return __half22float2(reinterpret_cast<const __half2&>(spread));
  }
  /// One scale twice, as a pair of the activations' type.
  template <class Type>
  __device__ static uint32_t pair(const Packed& packed, int block, int row_tile, int half) {
    constexpr int shift = std::is_same_v<Type, device::HalfType> ? 6 : 3;
    const int byte = 2 * (row_tile % 2) + half;
    return __byte_perm(word(packed, block, row_tile), 0, 0x4040 | byte << 8 | byte) << shift;
  }
};

/// Sixteen f16 scales of a lane in the same order.
struct F16Scales {
  struct Packed {
    uint4 blocks[2];
  };
  static constexpr int bytes_per_lane = 32;
  static constexpr float sum_factor = 1;

  __device__ static uint32_t word(const Packed& packed, int block, int row_tile) {
    const uint4& v = packed.blocks[block];
    return row_tile == 0 ? v.x : row_tile == 1 ? v.y : row_tile == 2 ? v.z : v.w;
  }
  __device__ static float2 pair_of_sums(const Packed& packed, int block, int row_tile) {
    const uint32_t both = word(packed, block, row_tile);
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
  template <class Type>
  __device__ static uint32_t pair(const Packed& packed, int block, int row_tile, int half) {
    const uint32_t both = __byte_perm(word(packed, block, row_tile), 0, half == 0 ? 0x1010 : 0x3232);
    if constexpr (std::is_same_v<Type, device::HalfType>) return both;
    const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(both)));
    return Type::pack(value, value);
  }
};

/// How many lanes read the same scales; four, those of a row of outputs, where a kind of scales does not say otherwise.
template <class Scales>
constexpr int sharers = 4;
template <class Scales>
requires requires { Scales::sharers; }
constexpr int sharers<Scales> = Scales::sharers;

/// Whether weights are multiplied by their scales, whatever the number of rows; else sums are where there are few.
template <class Scales>
constexpr bool scales_weights = requires {
  requires Scales::on_weights;
};

/// Of sums that have met their scales.
struct UnitScales {
  struct Packed {};
  __device__ static float2 pair_of_sums(const Packed&, int, int) { return make_float2(1, 1); }
};

/// The scale of rows g and that of rows g + 8 of a row tile, each twice in a register.
template <class Type, class Scales>
__device__ __forceinline__ void scale_registers(const typename Scales::Packed& packed, int block, int row_tile,
                                                float factor, uint32_t (&scale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (requires { Scales::template rounded_pair<Type>(packed, block, row_tile, half, factor); }) {
      scale[half] = Scales::template rounded_pair<Type>(packed, block, row_tile, half, factor);
    } else {
      scale[half] = Scales::template pair<Type>(packed, block, row_tile, half);
    }
  }
}

/// One lane's codes of a 64 × 64 tile.
template <int bits>
struct WeightTile {
  uint4 codes[bits];

  /// Those of tile `index`; `of_lane` is the lane's first in tile 0.
  __device__ void load(const uint4* of_lane, int64_t index) {
    const uint4* const from = of_lane + index * (Map::tile_words(bits) / 4);
#pragma unroll
    for (int j = 0; j < bits; ++j) codes[j] = device::load_once(from + j * Map::lanes);
  }
  /// Word w (a compile-time constant after unrolling) of the lane's 4 · bits words.
  __device__ uint32_t word(int w) const {
    const uint4& group = codes[w / 4];
    return w % 4 == 0 ? group.x : w % 4 == 1 ? group.y : w % 4 == 2 ? group.z : group.w;
  }
  /// The A registers of one row tile and mma step.
  template <class Table>
  __device__ void decode(int row_tile, int step, const Table& table, uint32_t (&a)[4]) const {
    table.step([&](int w) { return word(row_tile * bits + w); }, step, a);
  }
};

/// Where a lane's codes and scales stand in any tile.
template <int bits, class Scales>
struct WeightReader {
  const uint4* codes;
  const char* scales;

  __device__ WeightReader(const uint32_t* all_codes, const void* all_scales)
      : codes(reinterpret_cast<const uint4*>(all_codes) + threadIdx.x % 32),
        scales(static_cast<const char*>(all_scales) + threadIdx.x % 32 / sharers<Scales> * Scales::bytes_per_lane) {}

  __device__ void load(WeightTile<bits>& tile, int64_t index) const { tile.load(codes, index); }
  __device__ void load(typename Scales::Packed& packed, int64_t index) const {
    const char* const first = scales + index * (32 / sharers<Scales> * Scales::bytes_per_lane);
    const auto* const from = reinterpret_cast<const uint4*>(first);
    if constexpr (requires { Scales::load(packed, first); }) {
      Scales::load(packed, first);
    } else if constexpr (Scales::bytes_per_lane == 16) {
      packed.bytes = __ldg(from);
    } else {
      packed.blocks[0] = __ldg(from);
      packed.blocks[1] = __ldg(from + 1);
    }
  }
};

}  // namespace w4q::kernels::kbit
