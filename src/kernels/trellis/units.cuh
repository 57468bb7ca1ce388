// What the kernels of units share: how a launch is cut, and codes on their way to shared memory. A *unit* is what a warp
// multiplies at a time: half a tile, 32 inputs of a strip.
#pragma once

#include <algorithm>

#include "device/async_copy.cuh"
#include "kernels/frame/tile.cuh"
#include "kernels/trellis/launch.cuh"

namespace w4q::kernels::trellis {

constexpr int piece_units = 2 * piece_tiles;

/// The pieces of 256 inputs that a block's units lie in: some from piece `begin` on, then some from 0 on.
struct UnitPieces {
  int begin, first, second;

  /// Of units [column, column + count) of `units`, which begin anew behind the last.
  __device__ UnitPieces(int column, int count, int units) : begin(column / piece_units) {
    const auto pieces = [](int past) { return (past + piece_units - 1) / piece_units; };
    const int past = column + min(count, units);
    first = pieces(min(past, units)) - begin;
    second = min(pieces(max(past - units, 0)), begin);
  }
  /// Most of them, for blocks of so many units.
  static int64_t most(int64_t count, int units) {
    return std::min<int64_t>((units + piece_units - 1) / piece_units, count / piece_units + 3);
  }

  __device__ int count() const { return first + second; }
  __device__ int piece(int i) const { return i < first ? begin + i : i - first; }
  /// Where a unit stands.
  __device__ int place(int unit) const {
    const int first_unit = begin * piece_units;
    return unit >= first_unit ? unit - first_unit : first * piece_units + unit;
  }
};

/// What a launch needs beside the rest, made on the host: divisions are what stands in front of a block's first copy.
struct UnitLaunch : TrellisLaunch {
  frame::Partition blocks;    ///< of all units
  int units;                  ///< of a strip, or of each of the parts of k that warps take side by side
  uint32_t group_reciprocal;  ///< 2^32 / the units of a group, rounded up
  bool stores_quads;          ///< y is f16, without a residual, and four outputs of a row can be stored at once

  UnitLaunch(const TrellisLaunch& args, int grid, int strip_units, int group_units)
      : TrellisLaunch(args),
        blocks(args.n_tiles * strip_units, grid),
        units(strip_units),
        group_reciprocal(static_cast<uint32_t>((int64_t{1} << 32) / group_units + 1)),
        stores_quads(!args.fp32 && args.residual == nullptr && args.n % 4 == 0 && args.ldy % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(args.y) % 8 == 0) {}
  /// The group of a unit: exact for units · group_units < 2^32.
  __device__ __forceinline__ int group_of(int at) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(at), group_reciprocal));
  }
};

/// Codes of a warp's units in shared memory, one at hand and the next ones on their way. A lane copies what it decodes:
/// nobody waits for another.
template <int bits>
struct UnitRing {
  static constexpr int stages = 3;
  static constexpr int stage_bytes = bits * 512, unit_quads = bits * Map::lanes;
  static constexpr int bytes = stages * stage_bytes;
  char* const memory;
  int reading = 0, used = bytes - stage_bytes;  ///< places: of the unit at hand, and of the one before

  __device__ explicit UnitRing(char* of_warp) : memory(of_warp + threadIdx.x % 32 * 16) {}

  /// Begins to copy a unit; `from`: the lane's first.
  __device__ __forceinline__ void copy(int place, const uint4* from) const {
#pragma unroll
    for (int j = 0; j < bits; ++j) device::copy_async(memory + place + j * 512, from + j * Map::lanes);
  }
  __device__ __forceinline__ void read(uint32_t (&words)[4 * bits]) const {
#pragma unroll
    for (int j = 0; j < bits; ++j) {
      const uint4 quad = *reinterpret_cast<const uint4*>(memory + reading + j * 512);
      words[4 * j] = quad.x, words[4 * j + 1] = quad.y, words[4 * j + 2] = quad.z, words[4 * j + 3] = quad.w;
    }
  }
  __device__ __forceinline__ void next() {
    used = reading;
    reading = reading == bytes - stage_bytes ? 0 : reading + stage_bytes;
  }
};

}  // namespace w4q::kernels::trellis
