// Marlin's int4 words with symmetric codes for the warpgroup kernels: bulk copies of tiles and scales to shared memory,
// and from there by arithmetic to registers of A.
#pragma once

#include <type_traits>

#include "device/fragment.cuh"
#include "kernels/wgmma/arrange.h"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels::wgmma {

/// The weights as a launch knows them.
struct MarlinSource {
  CUtensorMap codes;   ///< [step of sixteen inputs][N-tile][512 bytes]
  CUtensorMap scales;  ///< [group][N-tile][128 bytes]
  int groups;          ///< of scales; 0: outputs have one scale each, which the results meet
  int group_shift;     ///< a group is 2^group_shift blocks of 32 inputs
  bool plain_scales;   ///< they are of the activations' type, and no product with a code leaves it
  float scale_factor;  ///< otherwise: keeps products inside f16
  bool bf16_scales;
};

template <class Type_, int outputs = 256>
struct MarlinWeights {
  using Type = Type_;
  using Source = MarlinSource;
  static constexpr bool makes_inputs = false;
  static constexpr InputOrder input_order(int) { return InputOrder::plain; }
  static constexpr int n_tiles = outputs / 64;  ///< of a job
  static constexpr int table_bytes = 0;
  static constexpr int step_bytes = 512;         ///< of an N-tile
  static constexpr int group_scale_bytes = 128;  ///< of an N-tile
  /// Codes [step][N-tile], then scales [tile][block of 32 inputs][N-tile].
  static constexpr int code_bytes(int tiles) { return tiles * 4 * n_tiles * step_bytes; }
  static constexpr int block_scale_bytes = n_tiles * group_scale_bytes;
  static constexpr int stage_bytes(int tiles) { return code_bytes(tiles) + tiles * 2 * block_scale_bytes; }

  __device__ static void fill_table(char*, const Source&) {}

  /// The group of a block of 32 inputs; blocks beyond the weight have the last group's scales: they meet zeros.
  __device__ static int group_of(const Source& source, int block) {
    return min(block >> source.group_shift, source.groups - 1);
  }
  /// Blocks of a tile that have scales of their own: 0, 1 or 2.
  __device__ static int scale_blocks(const Source& source) {
    return source.groups == 0 ? 0 : source.group_shift > 0 ? 1 : 2;
  }

  /// Bytes that fetch() brings.
  __device__ static uint32_t tile_bytes(const Source& source) {
    return code_bytes(1) + scale_blocks(source) * block_scale_bytes;
  }
  /// Starts copies of tile `tile` to place `index` of a stage of `tiles`. Row groups and steps beyond the weight are
  /// zeros.
  template <int tiles>
  __device__ static void fetch(const Source& source, int strip, int tile, uint32_t stage, int index, uint32_t barrier) {
    copy_box(stage + code_bytes(index), &source.codes, make_int2(strip * n_tiles * (step_bytes / 8), 4 * tile),
             barrier);
    const uint32_t scales = stage + code_bytes(tiles) + 2 * index * block_scale_bytes;
    for (int block = 0; block < scale_blocks(source); ++block) {
      copy_box(scales + block * block_scale_bytes, &source.scales,
               make_int2(strip * n_tiles * (group_scale_bytes / 4), group_of(source, 2 * tile + block)), barrier);
    }
  }

  /// A lane's codes and scales of one row tile of one tile.
  struct Words {
    uint32_t codes[4];      ///< of each step
    uint32_t scales[2][2];  ///< of each block, rows g and g + 8: pairs of the activations' type
  };

  /// One warp's view of a stage of `tiles` tiles: N-tile `group`, row tile `row_tile`.
  template <int tiles>
  struct Decoder {
    const Source& source;
    const char* codes;  ///< of the first stage
    const char* scales;
    int second_block;    ///< how far the scales of a tile's second block are from those of its first
    uint32_t low, high;  ///< bytes of a pair of scales and of ones that make a pair of the first scale, of the second

    __device__ Decoder(const char*, const char* first_stage, const Source& source_, int group, int row_tile)
        : source(source_),
          codes(first_stage + group * step_bytes + threadIdx.x % 32 * 16 + row_tile * 4),
          scales(first_stage + code_bytes(tiles) + group * group_scale_bytes + threadIdx.x % 32 / 4 * 16 +
                 row_tile * 4),
          second_block(scale_blocks(source_) == 2 ? block_scale_bytes : 0),
          low(source_.groups == 0 ? 0x5454 : 0x1010),
          high(source_.groups == 0 ? 0x5454 : 0x3232) {
      // Kept in registers, not made anew for every tile.
      asm volatile("" : "+r"(low), "+r"(high), "+r"(second_block));
    }

    /// Tile `tile` of the stage at `offset`; of the weight it is some other, which does not matter here.
    __device__ __forceinline__ void load(int offset, int tile, int, Words& words) const {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        words.codes[step] =
            *reinterpret_cast<const uint32_t*>(codes + offset + (4 * tile + step) * n_tiles * step_bytes);
      }
      const char* const from = scales + offset + 2 * tile * block_scale_bytes;
      uint32_t both[2] = {*reinterpret_cast<const uint32_t*>(from),
                          *reinterpret_cast<const uint32_t*>(from + second_block)};
      if (!source.plain_scales) both[0] = converted(both[0]), both[1] = converted(both[1]);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        words.scales[block][0] = __byte_perm(both[block], ones, low);
        words.scales[block][1] = __byte_perm(both[block], ones, high);
      }
    }

    __device__ __forceinline__ void decode(const Words& words, int step, uint32_t (&a)[4]) const {
      less_eight(words.codes[step], a);
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], words.scales[step / 2][reg % 2]);
    }

   private:
    static constexpr uint32_t ones = std::is_same_v<Type, device::HalfType> ? 0x3C003C00u : 0x3F803F80u;

    __device__ uint32_t converted(uint32_t both) const {
      const float2 scale = source.bf16_scales
                               ? make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u))
                               : __half22float2(reinterpret_cast<const __half2&>(both));
      return Type::pack(scale.x * source.scale_factor, scale.y * source.scale_factor);
    }

    /// Codes less 8, exactly. Register 2·upper + half is nibbles p = 2·half + upper and p + 4.
    __device__ static void less_eight(uint32_t word, uint32_t (&a)[4]) {
      if constexpr (std::is_same_v<Type, device::HalfType>) {
        // A code in the lowest bits of 1024 reads 1024 + code, four bits higher 1024 + 16 · code.
        const uint32_t high = word >> 8;
        a[0] = add_to(device::and_or(word, 0x000F000Fu, 0x64006400u), 0x3C003C00u, 0xE408E408u);
        a[2] = add_to(device::and_or(word, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD480D480u);
        a[1] = add_to(device::and_or(high, 0x000F000Fu, 0x64006400u), 0x3C003C00u, 0xE408E408u);
        a[3] = add_to(device::and_or(high, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD480D480u);
      } else {
        // In the lowest bits of 128 a code reads 128 + code.
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const uint32_t pair = device::and_or(word >> (4 * p), 0x000F000Fu, 0x43004300u);
          asm("fma.rn.bf16x2 %0, %1, %2, %3;"
              : "=r"(a[p % 2 * 2 + p / 2])
              : "r"(pair), "r"(0x3F803F80u), "r"(0xC308C308u));
        }
      }
    }
    __device__ static uint32_t add_to(uint32_t value, uint32_t factor, uint32_t add) {
      uint32_t result;
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(value), "r"(factor), "r"(add));
      return result;
    }
  };
};

}  // namespace w4q::kernels::wgmma
