// The pieces of the integer GEMV's main loop that know Marlin's words: load and dequant.
#pragma once

#include <type_traits>

#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::integer {

using kbit::Launch;

/// MarlinLaunch::group_shift of a weight whose inputs are all in one group: its scales multiply the outputs.
constexpr int one_group = 31;

/// What a launch on Marlin's words needs on top.
struct MarlinLaunch : Launch {
  const void* zeros;         ///< null: every zero point is 2^(bits−1)
  const int32_t* order;      ///< [k] act order: where the input at a place comes from; null: from there
  int input_tiles;           ///< of 16 inputs
  int64_t input_tile_loads;  ///< 128-bit loads that a row of input tiles takes
  int64_t padded_rows;       ///< outputs in a row of scales
  int group_shift;           ///< a group is 2^group_shift blocks of 32 inputs, or one_group
  bool bf16_scales;
  float weight_factor;  ///< a power of two for scales that multiply weights
};

/// Codes to values of the activations' type, two at a time and without arithmetic: a register of mma's A operand holds
/// unit · (code + offset).
///
///   f16          a code stands in the lowest bits of a half, which reads code · 2^-24, a subnormal: exact, and exact
///                in the product, since tensor cores take subnormals as they are
///   bf16, 4 bits the code stands below the exponent of 128, which reads 128 + code
///   bf16, 8 bits the code is converted; 128 is taken off so that 8 bits of significand hold it
template <int bits, class Type>
struct Codec {
  static constexpr bool half = std::is_same_v<Type, device::HalfType>;
  static constexpr float offset = half ? 0 : bits == 4 ? 128 : -128;
  static constexpr uint32_t unit_pair = half ? 0x00010001u : 0x3F803F80u;

  /// Two codes at the bottom of the word's halves.
  __device__ static uint32_t pair(uint32_t word) {
    constexpr uint32_t mask = bits == 4 ? 0x000F000Fu : 0x00FF00FFu;
    if constexpr (half) return word & mask;
    if constexpr (bits == 4) return device::and_or(word, mask, 0x43004300u);
    // 2^23 + code as fp32 bits, minus 2^23 + 128
    const float low = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440)) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7442)) - 8388736.0f;
    return Type::pack(low, high);
  }
};

/// One lane's codes of 64 outputs × 64 inputs: four steps along k of Marlin's tiles.
template <int bits>
struct WeightTile {
  static constexpr int loads_per_step = bits / 4;
  uint4 codes[4 * loads_per_step];

  /// Word w (a compile-time constant after unrolling) of the lane's words of a step.
  __device__ uint32_t word(int step, int w) const {
    const uint4& group = codes[step * loads_per_step + w / 4];
    return w % 4 == 0 ? group.x : w % 4 == 1 ? group.y : w % 4 == 2 ? group.z : group.w;
  }
  /// The word whose halves have at the bottom the two codes of A register `reg` = 2 · upper + half.
  __device__ uint32_t register_bits(int row_tile, int step, int reg) const {
    const int half = reg % 2;
    const int upper = reg / 2;
    if constexpr (bits == 4) return word(step, row_tile) >> (4 * (2 * half + upper));
    return word(step, 2 * row_tile + half) >> (8 * upper);
  }
  /// The A registers of one row tile and mma step.
  template <class Type>
  __device__ void decode(int row_tile, int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) a[reg] = Codec<bits, Type>::pair(register_bits(row_tile, step, reg));
  }
};

/// Where a lane's codes stand.
template <int bits>
struct WeightReader {
  const uint4* codes;
  int64_t step_loads;
  int input_tiles;

  __device__ explicit WeightReader(const MarlinLaunch& args)
      : codes(reinterpret_cast<const uint4*>(args.codes) + threadIdx.x % 32 * WeightTile<bits>::loads_per_step),
        step_loads(args.input_tile_loads),
        input_tiles(args.input_tiles) {}

  /// The tile of row group `group` and the 64 inputs from 64 · `column` on. Steps beyond k are read from inside: they
  /// meet zeros.
  __device__ void load(WeightTile<bits>& tile, int group, int column) const {
    const uint4* const from = codes + static_cast<int64_t>(group) * (8 * bits);
    if (4 * column + 4 <= input_tiles) {
      const uint4* at = from + 4 * column * step_loads;
#pragma unroll
      for (int step = 0; step < 4; ++step) load_step(tile, step, at + step * step_loads);
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        load_step(tile, step, from + min(4 * column + step, input_tiles - 1) * step_loads);
      }
    }
  }

 private:
  __device__ static void load_step(WeightTile<bits>& tile, int step, const uint4* from) {
    if constexpr (bits == 4) {
      tile.codes[step] = device::load_once(from);
    } else {  // two neighbours in one sector: the second comes from L1
      tile.codes[2 * step] = __ldg(from);
      tile.codes[2 * step + 1] = __ldg(from + 1);
    }
  }
};

/// A lane's scales and zero points of one group: outputs g + 8·j of a row group, j = 2 · row tile + half.
template <int bits, bool with_zeros>
struct Group {
  uint4 scales;
  uint32_t zeros[with_zeros ? bits / 4 : 1];

  /// The scales of half 0 and 1 of a row tile.
  __device__ float2 scale_pair(int row_tile, bool bf16) const {
    const uint32_t both = row_tile == 0 ? scales.x : row_tile == 1 ? scales.y : row_tile == 2 ? scales.z : scales.w;
    if (bf16) return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
  __device__ float zero_code(int row_tile, int half) const {
    if constexpr (!with_zeros) return 1 << (bits - 1);
    const uint32_t code = bits == 4 ? zeros[0] >> (4 * (row_tile + 4 * half)) & 15u
                                    : zeros[row_tile / 2 % (bits / 4)] >> (8 * (row_tile % 2 + 2 * half)) & 255u;
    return static_cast<float>(code);
  }
  /// What is to be taken off a decoded value, in units.
  template <class Type>
  __device__ float zero(int row_tile, int half) const {
    return zero_code(row_tile, half) + Codec<bits, Type>::offset;
  }
};

template <int bits, bool with_zeros>
struct GroupReader {
  const uint4* scales;
  const uint32_t* zeros;
  int64_t padded_rows;
  int group_shift;

  __device__ explicit GroupReader(const MarlinLaunch& args)
      : scales(static_cast<const uint4*>(args.scales) + threadIdx.x % 32 / 4),
        zeros(static_cast<const uint32_t*>(args.zeros) + threadIdx.x % 32 / 4 * (bits / 4)),
        padded_rows(args.padded_rows),
        group_shift(args.group_shift) {}

  /// The group of block `block` of 32 inputs. One group for all inputs: its scales multiply the output instead.
  __device__ void load(Group<bits, with_zeros>& group, int row_group, int block) const {
    const int index = block >> group_shift;
    if (group_shift != one_group) {
      group.scales = __ldg(scales + (index * padded_rows + 64 * row_group) / 8);
    } else {
      group.scales = make_uint4(0, 0, 0, 0);
    }
    if constexpr (with_zeros) {
#pragma unroll
      for (int i = 0; i < bits / 4; ++i) {
        group.zeros[i] = __ldg(zeros + (index * padded_rows + 64 * row_group) * bits / 32 + i);
      }
    }
  }
};

/// The groups of the two blocks of a tile.
template <int bits, bool with_zeros>
struct TileGroups {
  GroupReader<bits, with_zeros> reader;
  int last_block;

  __device__ explicit TileGroups(const MarlinLaunch& args)
      : reader(args), last_block(static_cast<int>((args.k - 1) / 32)) {}

  /// Whether both blocks of every tile are in one group.
  __device__ bool coarse() const { return reader.group_shift > 0; }

  __device__ void load(Group<bits, with_zeros> (&groups)[2], int row_group, int column) const {
    reader.load(groups[0], row_group, 2 * column);
    if (coarse()) {
      groups[1] = groups[0];
    } else {
      reader.load(groups[1], row_group, min(2 * column + 1, last_block));
    }
  }
};

}  // namespace w4q::kernels::integer
