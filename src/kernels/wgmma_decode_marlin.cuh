// Marlin's int4 words with symmetric codes for the warpgroup kernels: bulk copies of tiles and scales to shared memory,
// and from there by arithmetic to registers of A.
#pragma once

#include <type_traits>

#include "device/fragment.cuh"
#include "kernels/wgmma_pipeline.cuh"
#include "kernels/wgmma_plan.h"

namespace w4q::kernels::wgmma {

template <class Type_>
struct MarlinWeights {
  using Type = Type_;

  /// The weights as a launch knows them.
  struct Source {
    const char* codes;
    const char* scales;
    int64_t step_bytes;   ///< of sixteen inputs of all outputs
    int64_t group_bytes;  ///< of the scales of a group
    int row_groups;       ///< of 64 outputs
    int steps;            ///< of sixteen inputs
    int groups;           ///< of scales; 0: outputs have one scale each, which the results meet
    int group_shift;      ///< a group is 2^group_shift blocks of 32 inputs
    float scale_factor;   ///< keeps products inside f16
    bool bf16_scales;
  };

  static constexpr int row_groups = job_outputs / 64;
  static constexpr int table_bytes = 0;
  static constexpr int step_bytes = 512;         ///< of a row group
  static constexpr int group_scale_bytes = 128;  ///< of a row group
  /// Codes [step][row group], then scales [group][row group].
  static constexpr int code_bytes(int tiles) { return tiles * 4 * row_groups * step_bytes; }
  static constexpr int stage_bytes(int tiles) { return code_bytes(tiles) + tiles * 2 * row_groups * group_scale_bytes; }

  __device__ static void fill_table(char*, const Source&) {}

  __device__ static int groups_inside(const Source& source, int strip) {
    return min(row_groups, source.row_groups - strip * row_groups);
  }
  /// The group of a block of 32 inputs; blocks beyond the weight have the last group's scales: they meet zeros.
  __device__ static int group_of(const Source& source, int block) {
    return min(block >> source.group_shift, source.groups - 1);
  }
  __device__ static int scale_groups(const Source& source, int first, int count) {
    if (source.groups == 0) return 0;
    return group_of(source, 2 * (first + count) - 1) - group_of(source, 2 * first) + 1;
  }

  /// Bytes that fetch() brings.
  __device__ static uint32_t bytes(const Source& source, int strip, int first, int count) {
    const int steps = min(4 * count, source.steps - 4 * first);
    return static_cast<uint32_t>(groups_inside(source, strip) *
                                 (steps * step_bytes + scale_groups(source, first, count) * group_scale_bytes));
  }
  /// Starts copies of `count` tiles from tile `first` on; all lanes of a warp. Row groups and steps beyond the weight
  /// stay as they are: sums that are not stored, codes that meet zeros.
  template <int tiles>
  __device__ static void fetch(const Source& source, int strip, int first, int count, uint32_t stage,
                               uint32_t barrier) {
    const int lane = threadIdx.x % 32;
    const int inside = groups_inside(source, strip);
    const int first_group = strip * row_groups;
    if (lane < 16) {
      if (lane >= min(4 * count, source.steps - 4 * first)) return;
      copy_bulk(stage + lane * row_groups * step_bytes,
                source.codes + (4 * first + lane) * source.step_bytes + first_group * step_bytes, inside * step_bytes,
                barrier);
    } else {
      const int index = lane - 16;
      if (index >= scale_groups(source, first, count)) return;
      copy_bulk(
          stage + code_bytes(tiles) + index * row_groups * group_scale_bytes,
          source.scales + (group_of(source, 2 * first) + index) * source.group_bytes + first_group * group_scale_bytes,
          inside * group_scale_bytes, barrier);
    }
  }

  /// A lane's codes and scales of one row tile of one tile.
  struct Words {
    uint32_t codes[4];        ///< of each step
    uint32_t scales[2] = {};  ///< of each block: rows g and g + 8
  };

  /// One warp's view of a stage of `tiles` tiles: row group `group`, row tile `row_tile`.
  template <int tiles>
  struct Decoder {
    const Source& source;
    const char* codes;  ///< of the first stage
    const char* scales;

    __device__ Decoder(const char*, const char* first_stage, const Source& source_, int group, int row_tile)
        : source(source_),
          codes(first_stage + group * step_bytes + threadIdx.x % 32 * 16 + row_tile * 4),
          scales(first_stage + code_bytes(tiles) + group * group_scale_bytes + threadIdx.x % 32 / 4 * 16 +
                 row_tile * 4) {}

    /// Tile `tile` of the stage at `offset`, whose first tile is the weight's tile `first`.
    __device__ __forceinline__ void load(int offset, int first, int tile, Words& words) const {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        words.codes[step] =
            *reinterpret_cast<const uint32_t*>(codes + offset + (4 * tile + step) * row_groups * step_bytes);
      }
      if (source.groups == 0) return;
      const int begin = group_of(source, 2 * first);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int group = group_of(source, 2 * (first + tile) + block) - begin;
        words.scales[block] =
            *reinterpret_cast<const uint32_t*>(scales + offset + group * row_groups * group_scale_bytes);
      }
    }

    __device__ __forceinline__ void decode(const Words& words, int step, uint32_t (&a)[4]) const {
      less_eight(words.codes[step], a);
      if (source.groups == 0) return;
      const float2 scale = scale_pair(words.scales[step / 2]);
      const uint32_t pairs[2] = {Type::pack(scale.x, scale.x), Type::pack(scale.y, scale.y)};
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], pairs[reg % 2]);
    }

   private:
    __device__ float2 scale_pair(uint32_t both) const {
      const float2 scale = source.bf16_scales
                               ? make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u))
                               : __half22float2(reinterpret_cast<const __half2&>(both));
      return make_float2(scale.x * source.scale_factor, scale.y * source.scale_factor);
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
