// Trellises for the warpgroup kernels: bulk copies of whole tiles to shared memory, and from there levels as registers of
// A, whole numbers of f16. Scales of outputs meet the sums in the end. The blocks of a launch rotate the activations
// together.
//
// A warp's sixteen outputs of a tile are one run of every column: what four lanes t of the layout hold. So lane 4·g + t
// has rows g and g + 8 of the runs of lane t's sixteen columns, four of them a step, and the lanes of a column read the
// same words. With the 16 bits before it a run is a stream of bytes; a window lies in three neighbours, which one byte
// permutation brings together. Those of row g + 8 are `bits` bytes further on, at the same place in a byte.
#pragma once

#include "core/host_device.h"
#include "kernels/rotated/share.cuh"
#include "kernels/trellis/windows.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels::trellis {

struct TrellisSource {
  CUtensorMap codes;  ///< [strip][tile][2][half a tile's words]
  int tiles;          ///< along k
  int window, right;  ///< 32 less that
  rotated::SharedInputs inputs;
  char* arranged;  ///< where they go: [tile of rows][tile along k] as wgmma/arrange.h has a tile

  static constexpr int count = 1;  ///< of passes
};

/// A lane's rows g and g + 8 of runs: which bytes their windows lie in, and how they are shifted out at both ends.
template <int bits>
struct RunWindows {
  static constexpr bool by_halves = bits == 3;  ///< the last 16 bits of two runs stand in one word
  /// Selectors of row g, among the word with the 16 bits before and the first word of the run, and of row g + 8, among
  /// the first and the last one: of columns 2·i and 2·i + 1.
  uint32_t first[2] = {}, second[2] = {};
  uint32_t left, factor;  ///< a shift, and 1 << that

  W4Q_HOST_DEVICE constexpr RunWindows(int row, int window) {
    const int begin = (row + 1) * bits;  // of the stream
    left = static_cast<uint32_t>(begin % 8 + 24 - window);
    factor = 1u << left;
    for (int column = 0; column < 2; ++column) {
      const int end = by_halves && column == 0 ? 3 : 1;  // the byte of its word in which the last 16 bits begin
      for (int i = 0; i < 3; ++i) {
        // Bytes of the stream: two before the run, four of its first word, and what is behind that.
        const int at = begin / 8 + i, next = at + bits;
        const int of_first = at < 2 ? end - at : 4 + (5 - at) % 4;
        const int of_second = next < 6 ? 5 - next : 4 + ((by_halves ? end : 3) + 6 - next) % 4;
        first[column] = first[column] << 4 | static_cast<uint32_t>(of_first & 7);
        second[column] = second[column] << 4 | static_cast<uint32_t>(of_second & 7);
      }
    }
  }
  /// A level and level_offset as the low half of f16 bits. `right`: 32 less the window.
  template <bool by_shifter>
  __device__ __forceinline__ uint32_t level(uint32_t low, uint32_t high, uint32_t selector, int right) const {
    const uint32_t bytes = permute(low, high, selector);
    const uint32_t shifted = by_shifter ? bytes << left : multiplied(bytes, factor);
    return __dp4a((shifted >> right) * formats::trellis_multiplier, 0x01010101u, 0x6400u);
  }

 private:
  /// By the multiplier, which has less to do here: the compiler would shift.
  __device__ __forceinline__ static uint32_t multiplied(uint32_t word, uint32_t by) {
    uint32_t result;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(by));
    return result;
  }
};

/// Of a step's words: the first of a column's run, and the one with its last 16 bits.
template <int bits>
W4Q_HOST_DEVICE constexpr int begin_word(int column) {
  return bits == 3 ? 3 * (column / 2) + column % 2 : bits / 2 * column;
}
template <int bits>
W4Q_HOST_DEVICE constexpr int end_word(int column) {
  return bits == 3 ? 3 * (column / 2) + 2 : bits / 2 * (column + 1) - 1;
}

namespace detail {

/// Every bit of a run and of the 16 before it comes to its place in the windows of its rows, and no other bit does.
template <int bits>
constexpr bool windows_are_found(int window) {
  const auto permuted = [](uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 3; ++i) result |= static_cast<uint32_t>(bytes >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
    return result;
  };
  for (int row = 0; row < 16; ++row) {
    const RunWindows<bits> windows(row % 8, window);
    for (int column = 0; column < 2; ++column) {
      for (int bit = -16; bit < 16 * bits; ++bit) {  // of the run; those before it are the last 16 of another
        uint32_t words[2 * bits] = {}, before[2 * bits] = {};
        const auto at = Map::run_bit(bits, column, bit < 0 ? 16 * bits + bit : bit);
        (bit < 0 ? before : words)[at.word] = 1u << at.bit;
        const uint32_t begin = words[begin_word<bits>(column)];
        const uint32_t bytes = row < 8 ? permuted(before[end_word<bits>(column)], begin, windows.first[column])
                                       : permuted(begin, words[end_word<bits>(column)], windows.second[column]);
        const int place = (row + 1) * bits - 1 - bit;  // from the newest on
        const uint32_t expected = place >= 0 && place < window ? 1u << place : 0;
        if ((bytes * windows.factor) >> (32 - window) != expected) return false;
      }
    }
  }
  return true;
}
static_assert(windows_are_found<2>(16) && windows_are_found<3>(16) && windows_are_found<4>(16));
static_assert(windows_are_found<2>(8) && windows_are_found<3>(14) && windows_are_found<4>(13));

}  // namespace detail

template <int bits, int outputs = 256>
struct TrellisWeights {
  using Type = device::HalfType;
  using Source = TrellisSource;
  static constexpr bool makes_inputs = true;
  static constexpr int n_tiles = outputs / static_cast<int>(Map::tile_rows);  ///< strips of a job
  static constexpr int table_bytes = 0;
  static constexpr int code_bytes = static_cast<int>(Map::tile_words(bits)) * 4;  ///< of a tile of 128 × 64
  /// Of `tiles` tiles along k: codes [tile][strip].
  static constexpr int stage_bytes(int tiles) { return tiles * n_tiles * code_bytes; }

  __device__ static void fill_table(char*, const Source&) {}

  /// Bytes that fetch() brings.
  __device__ static uint32_t tile_bytes(const Source&) { return n_tiles * code_bytes; }
  /// Starts copies of tile `tile` to place `index` of a stage. Strips beyond the weight are zeros.
  template <int tiles>
  __device__ static void fetch(const Source& source, int job_strip, int tile, uint32_t stage, int index,
                               uint32_t barrier) {
    wgmma::copy_box(stage + index * n_tiles * code_bytes, &source.codes, make_int4(0, 0, tile, job_strip * n_tiles),
                    barrier);
  }

  /// Words are read as they are decoded, for there are no registers for those of a tile: where they stand, from the
  /// first stage on.
  struct Words {
    int at;
  };

  /// One warp's view of a stage: outputs 64·group + 16·row_tile … of a job.
  template <int tiles>
  struct Decoder {
    const Source& source;
    const char *run, *before;  ///< words of the lanes that have the run, and the one before
    RunWindows<bits> windows;

    __device__ Decoder(const char*, const char* first_stage, const Source& source_, int group, int row_tile)
        : source(source_),
          run(first_stage + lane_at(group, row_tile)),
          before(first_stage + lane_at(group, (row_tile + 4 * (group % 2) + 7) % 8 - 4 * (group % 2))),
          windows(static_cast<int>(threadIdx.x) % 32 / 4, source.window) {}

    __device__ __forceinline__ void load(int offset, int tile, int, Words& words) const {
      words.at = offset + tile * n_tiles * code_bytes;
    }

    __device__ __forceinline__ void decode(const Words& words, int step, uint32_t (&a)[4]) const {
      constexpr int count = 2 * bits;  // of a step: four columns
      uint32_t own[count], ends[4];
      load_words(run + words.at, count * step, own);
#pragma unroll
      for (int column = 0; column < 4; ++column)
        ends[column] = word(before + words.at, count * step + end_word<bits>(column));
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 2 * pair + i;
          const uint32_t begin = own[begin_word<bits>(column)], end = own[end_word<bits>(column)];
          low[i] = windows.template level<false>(ends[column], begin, windows.first[i], source.right);
          high[i] = i == 0 ? windows.template level<false>(begin, end, windows.second[i], source.right)
                           : windows.template level<true>(begin, end, windows.second[i], source.right);
        }
        a[2 * pair] = whole(low);
        a[2 * pair + 1] = whole(high);
      }
    }

   private:
    /// From the first stage: the strip, and in it the layout's lane 4·run + t.
    __device__ static int lane_at(int group, int row_tile) {
      return group / 2 * code_bytes + (4 * (4 * (group % 2) + row_tile) + static_cast<int>(threadIdx.x) % 4) * 16;
    }
    __device__ __forceinline__ static uint32_t word(const char* from, int w) {
      return *reinterpret_cast<const uint32_t*>(from + w / 4 * 512 + w % 4 * 4);
    }
    /// Words from `first` on, an even number, in as few loads as they are aligned to.
    template <int count>
    __device__ __forceinline__ static void load_words(const char* from, int first, uint32_t (&words)[count]) {
#pragma unroll
      for (int i = 0; i < count; i += 2) {
        const int w = first + i;
        const char* const at = from + w / 4 * 512 + w % 4 * 4;
        if (w % 4 == 0 && i + 4 <= count) {
          const uint4 quad = *reinterpret_cast<const uint4*>(at);
          words[i] = quad.x, words[i + 1] = quad.y, words[i + 2] = quad.z, words[i + 3] = quad.w;
        } else if (w % 4 == 0 || i == 0) {
          const uint2 two = *reinterpret_cast<const uint2*>(at);
          words[i] = two.x, words[i + 1] = two.y;
        }
      }
    }
    /// Two levels as f16, exactly.
    __device__ __forceinline__ static uint32_t whole(const uint32_t (&sums)[2]) {
      constexpr uint32_t middle = 0xE400E400u + 0x00010001u * formats::trellis_largest_level;  // −level_offset
      uint32_t result;
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(permute(sums[0], sums[1], 0x5410)), "r"(middle));
      return result;
    }
  };

  /// Tiles of activations along k, for each tile of rows.
  __device__ static int input_tiles(const Source& source) { return source.tiles; }

  /// Every `stride`-th piece of the activations from piece `first` on, for tiles of `rows` rows.
  template <int rows>
  __device__ static void make_inputs(const Source& source, int first, int stride) {
    rotated::make_inputs(source.inputs, first, stride, [&](int, int row, int column, const uint4& words) {
      const int tile = column / 64;
      if (tile >= source.tiles) return;
      char* const to = source.arranged + (static_cast<int64_t>(row / rows) * source.tiles + tile) * (rows * 128) +
                       row % rows * 128 + column % 64 / 16 * 4;
      // Words of a lane's sixteen columns change places: four columns of every lane are a step. Pieces as swizzling does.
      const int piece = column % 16 / 8 * 4;
      const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + ((piece + i) ^ row % 8) * 16) = all[i];
    });
  }
};

}  // namespace w4q::kernels::trellis
