// The pieces of the integer GEMV's main loop that know Marlin's words: load and dequant.
#pragma once

#include <type_traits>

#include "device/async_copy.cuh"
#include "kernels/frame/launch.cuh"

namespace w4q::kernels::integer {

using frame::Launch;

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
///   f16, 8 bits  a code stands in the lowest bits of a half, which reads code · 2^-24, a subnormal: exact, and exact
///                in the product, since tensor cores take subnormals as they are
///   f16, 4 bits  the same four bits higher, code · 2^-20: two of a word's four pairs of codes need no shift then
///   bf16, 4 bits the code stands below the exponent of 128, which reads 128 + code
///   bf16, 8 bits the code is converted; 128 is taken off so that 8 bits of significand hold it
template <int bits, class Type>
struct Codec {
  static constexpr bool half = std::is_same_v<Type, device::HalfType>;
  static constexpr float offset = half ? 0 : bits == 4 ? 128 : -128;
  static constexpr uint32_t unit_pair = !half ? 0x3F803F80u : bits == 4 ? 0x00100010u : 0x00010001u;

  /// Two codes at the bottom of the word's halves (f16, 4 bits: four bits higher).
  __device__ static uint32_t pair(uint32_t word) {
    constexpr uint32_t mask = bits == 4 ? 0x000F000Fu : 0x00FF00FFu;
    if constexpr (half) return word & (bits == 4 ? mask << 4 : mask);
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
    if constexpr (bits == 4 && Codec<bits, Type>::half) {
      const uint32_t low = word(step, row_tile);
      const uint32_t high = low >> 8;
      const uint32_t places[4] = {four_higher(low), four_higher(high), low, high};
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Codec<bits, Type>::pair(places[reg]);
    } else {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Codec<bits, Type>::pair(register_bits(row_tile, step, reg));
    }
  }

 private:
  /// In the multiplier, which has time; the compiler would make it one shift to the right, in the unit that also masks.
  __device__ static uint32_t four_higher(uint32_t word) {
    uint32_t result;
    asm("mul.lo.u32 %0, %1, 16;" : "=r"(result) : "r"(word));
    return result;
  }
};

/// Where a lane's codes stand. They come to registers, or by way of shared memory.
template <int bits>
struct WeightReader {
  static constexpr int tile_loads = 4 * WeightTile<bits>::loads_per_step;
  static constexpr int tile_bytes = tile_loads * 512;
  const uint4* codes;
  int64_t step_loads;
  int input_tiles;

  __device__ explicit WeightReader(const MarlinLaunch& args)
      : codes(reinterpret_cast<const uint4*>(args.codes) + threadIdx.x % 32 * WeightTile<bits>::loads_per_step),
        step_loads(args.input_tile_loads),
        input_tiles(args.input_tiles) {}

  /// The tile of N-tile `group` and the 64 inputs from 64 · `column` on. Steps beyond k are read from inside: they
  /// meet zeros.
  __device__ void load(WeightTile<bits>& tile, int group, int column) const {
    for_steps(group, column, [&](int step, const uint4* from) { load_step(tile, step, from); });
  }
  /// Starts bringing the tile to `stage`, as it stands: lanes side by side read side by side.
  __device__ void fetch(char* stage, int group, int column) const {
    constexpr int loads = WeightTile<bits>::loads_per_step;
    const int lane = threadIdx.x % 32;
    char* const to = stage + lane * 16;
    for_steps(group, column, [&](int step, const uint4* from) {
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        device::copy_async(to + (step * loads + i) * 512, from + 32 * i + lane * (1 - loads));
      }
    });
  }
  /// The lane's of what fetch() brought.
  __device__ static void read(const char* stage, WeightTile<bits>& tile) {
    constexpr int loads = WeightTile<bits>::loads_per_step;
    const char* const mine = stage + threadIdx.x % 32 * (16 * loads);
#pragma unroll
    for (int i = 0; i < tile_loads; ++i) {
      tile.codes[i] = *reinterpret_cast<const uint4*>(mine + i / loads * (512 * loads) + i % loads * 16);
    }
  }

 private:
  template <class Use>
  __device__ void for_steps(int group, int column, const Use& use) const {
    const uint4* const from = codes + static_cast<int64_t>(group) * (8 * bits);
    if (4 * column + 4 <= input_tiles) {
      const uint4* const at = from + 4 * column * step_loads;
#pragma unroll
      for (int step = 0; step < 4; ++step) use(step, at + step * step_loads);
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) use(step, from + min(4 * column + step, input_tiles - 1) * step_loads);
    }
  }
  __device__ static void load_step(WeightTile<bits>& tile, int step, const uint4* from) {
    if constexpr (bits == 4) {
      tile.codes[step] = device::load_once(from);
    } else {  // two neighbours in one sector: the second comes from L1
      tile.codes[2 * step] = __ldg(from);
      tile.codes[2 * step + 1] = __ldg(from + 1);
    }
  }
};

/// A lane's scales and zero points of one group: outputs g + 8·j of an N-tile, j = 2 · row tile + half.
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
  __device__ void load(Group<bits, with_zeros>& group, int n_tile, int block) const {
    const int index = block >> group_shift;
    if (group_shift != one_group) {
      group.scales = __ldg(scales + (index * padded_rows + 64 * n_tile) / 8);
    } else {
      group.scales = make_uint4(0, 0, 0, 0);
    }
    if constexpr (with_zeros) {
#pragma unroll
      for (int i = 0; i < bits / 4; ++i) {
        group.zeros[i] = __ldg(zeros + (index * padded_rows + 64 * n_tile) * bits / 32 + i);
      }
    }
  }
};

/// The groups of the two blocks of a tile.
template <int bits, bool with_zeros>
struct TileGroups {
  static constexpr int scale_bytes = 128;                       ///< of a block
  static constexpr int zero_bytes = with_zeros ? 8 * bits : 0;  ///< of a block
  static constexpr int tile_bytes = 2 * (scale_bytes + zero_bytes);
  GroupReader<bits, with_zeros> reader;
  int last_block;

  __device__ explicit TileGroups(const MarlinLaunch& args)
      : reader(args), last_block(static_cast<int>((args.k - 1) / 32)) {}

  /// Whether both blocks of every tile are in one group.
  __device__ bool coarse() const { return reader.group_shift > 0; }

  __device__ void load(Group<bits, with_zeros> (&groups)[2], int n_tile, int column) const {
    reader.load(groups[0], n_tile, 2 * column);
    if (coarse()) {
      groups[1] = groups[0];
    } else {
      reader.load(groups[1], n_tile, min(2 * column + 1, last_block));
    }
  }
};

/// The same by way of shared memory: scales [block][64], then zero points [block][64]. A lane brings 16 bytes of
/// either, or nothing: eight lanes for the scales of a block, then bits / 2 for its zero points.
template <int bits, bool with_zeros>
struct StagedGroups {
  static constexpr int scale_bytes = 128;                       ///< of a block
  static constexpr int zero_bytes = with_zeros ? 8 * bits : 0;  ///< of a block
  static constexpr int bytes = 2 * (scale_bytes + zero_bytes);
  const char* from;  ///< the lane's 16 bytes in the first group; null: nothing to bring
  int64_t group_bytes;
  int row_group_bytes;
  int to;
  int block, last_block, shift;
  uint32_t ones;  ///< a pair of scales where there is one group only: the outputs are scaled

  __device__ explicit StagedGroups(const MarlinLaunch& args)
      : from(nullptr),
        last_block(static_cast<int>((args.k - 1) / 32)),
        shift(args.group_shift),
        ones(args.bf16_scales ? 0x3F803F80u : 0x3C003C00u) {
    constexpr int zero_lanes = with_zeros ? zero_bytes / 16 : 1;
    const int lane = threadIdx.x % 32;
    const bool scales = lane < 16;
    block = scales ? lane / 8 : (lane - 16) / zero_lanes;
    const int chunk = scales ? lane % 8 : (lane - 16) % zero_lanes;
    to = scales ? lane * 16 : 2 * scale_bytes + (lane - 16) * 16;
    group_bytes = scales ? args.padded_rows * 2 : args.padded_rows * bits / 8;
    row_group_bytes = scales ? scale_bytes : 8 * bits;
    if (scales && shift != one_group) from = static_cast<const char*>(args.scales) + chunk * 16;
    if (with_zeros && !scales && block < 2) from = static_cast<const char*>(args.zeros) + chunk * 16;
  }
  /// Whether both blocks of every tile are in one group.
  __device__ bool coarse() const { return shift > 0; }

  /// Starts bringing those of a tile to `stage`.
  __device__ void fetch(char* stage, int n_tile, int column) const {
    if (from == nullptr) return;
    const int index = min(2 * column + block, last_block) >> shift;
    device::copy_async(stage + to, from + index * group_bytes + n_tile * row_group_bytes);
  }
  /// What fetch() brought for a block.
  __device__ Group<bits, with_zeros> read(const char* stage, int of_block) const {
    const int g = threadIdx.x % 32 / 4;
    Group<bits, with_zeros> group;
    if (shift == one_group) {
      group.scales = make_uint4(ones, ones, ones, ones);
    } else {
      group.scales = *reinterpret_cast<const uint4*>(stage + of_block * scale_bytes + g * 16);
    }
    if constexpr (with_zeros) {
      const auto* const words = reinterpret_cast<const uint32_t*>(stage + 2 * scale_bytes + of_block * zero_bytes);
#pragma unroll
      for (int i = 0; i < bits / 4; ++i) group.zeros[i] = words[g * (bits / 4) + i];
    }
    return group;
  }
};

}  // namespace w4q::kernels::integer
