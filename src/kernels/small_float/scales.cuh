// Scales of small floats as the loops of kbit weights take them (kernels/kbit/tile.cuh): E8M0 for 32 weights and f32 for a
// tile meet sums where rows are few and are rounded to f16 where weights meet them; E4M3 for 16 meet the weights always, in
// f16, which has every such product.
#pragma once

#include "kernels/kbit/tile.cuh"

namespace w4q::kernels::small_float {

using frame::Map;

/// Sixteen bytes of a lane, 8·block + 2·row_tile + half.
struct ByteScales {
  struct Packed {
    uint4 bytes;
  };
  static constexpr int bytes_per_lane = 16;

  __device__ static void load(Packed& packed, const char* from) {
    packed.bytes = __ldg(reinterpret_cast<const uint4*>(from));
  }
  /// Those of half 0 and half 1, in the lower two bytes.
  __device__ static uint32_t halves(const Packed& packed, int block, int row_tile) {
    const uint4& v = packed.bytes;
    const uint32_t word = block == 0 ? (row_tile < 2 ? v.x : v.y) : (row_tile < 2 ? v.z : v.w);
    return row_tile % 2 == 0 ? word : word >> 16;
  }
};

/// Of blocks of 32. A byte is the exponent of an f32; 0 reads 0 instead of 2^-127.
struct E8m0Scales : ByteScales {
  __device__ static float2 pair_of_sums(const Packed& packed, int block, int row_tile) {
    const uint32_t both = halves(packed, block, row_tile);
    return make_float2(__uint_as_float((both & 0xFFu) << 23), __uint_as_float((both & 0xFF00u) << 15));
  }
  /// One scale times `factor`, twice.
  template <class Type>
  __device__ static uint32_t rounded_pair(const Packed& packed, int block, int row_tile, int half, float factor) {
    const float2 both = pair_of_sums(packed, block, row_tile);
    const float value = (half == 0 ? both.x : both.y) * factor;
    return Type::pack(value, value);
  }
};

/// Of blocks of 16: two lanes of a row have the same ones. A byte shifted into an f16 reads value / 256, exactly.
struct E4m3Scales : ByteScales {
  static constexpr int sharers = 2;
  static constexpr bool on_weights = true;
  static constexpr float divisor = 256;

  template <class Type>
  __device__ static uint32_t pair(const Packed& packed, int block, int row_tile, int half) {
    static_assert(std::is_same_v<Type, device::HalfType>);
    return __byte_perm(halves(packed, block, row_tile), 0, half == 0 ? 0x4040 : 0x4141) << 7;
  }
};

/// Two floats for a tile: of rows g and of rows g + 8.
struct TileScales {
  struct Packed {
    float2 halves;
  };
  static constexpr int bytes_per_lane = 8;
  static constexpr int sharers = 32;

  __device__ static void load(Packed& packed, const char* from) {
    packed.halves = __ldg(reinterpret_cast<const float2*>(from));
  }
  __device__ static float2 pair_of_sums(const Packed& packed, int, int) { return packed.halves; }
  template <class Type>
  __device__ static uint32_t rounded_pair(const Packed& packed, int, int, int half, float factor) {
    const float value = (half == 0 ? packed.halves.x : packed.halves.y) * factor;
    return Type::pack(value, value);
  }
};

}  // namespace w4q::kernels::small_float
