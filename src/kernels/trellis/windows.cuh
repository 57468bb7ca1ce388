// Windows of trellis-fragment as tensor cores want them: of the words of a lane (layout_trellis_fragment.h) first words
// that hold whole windows, one byte permutation each, then windows, a shift by multiplication and a permutation each,
// then products, whose four bytes a level is the sum of (formats/trellis.h).
//
// Shifts are multiplications because funnel shifts and masks are what bound this: the multiplier stands idle beside them.
#pragma once

#include <cstdint>

#include "core/with_bits.h"
#include "device/unroll.cuh"
#include "formats/trellis.h"
#include "repack/layout_trellis_fragment.h"

namespace w4q::kernels::trellis {

using Map = repack::TrellisFragmentMap;

/// Which windows: those of 16 bits, and those of 14, which a scheme has that names none; 0 stands for all others, which
/// take a mask.
template <int width, int window_>
struct Codes {
  static constexpr int bits = width, window = window_;
  static constexpr int quads = 2 * bits;  ///< 128-bit loads of a lane and tile
};

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

/// By the multiplier: the compiler would make a shift and a mask of two shifts, both in the pipe that has most to do.
template <int count>
__device__ __forceinline__ uint32_t shifted_left(uint32_t word) {
  uint32_t result;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(result) : "r"(word), "n"(1 << count));
  return result;
}

/// The word turned around, by the shifter: what comes in from above stands below the window and is dropped with it.
template <int count>
__device__ __forceinline__ uint32_t turned_left(uint32_t word) {
  return __funnelshift_l(word, word, count);
}

/// Which pipe shifts: the multiplier, or where that has more to do, the shifter three of four.
enum class Shifts { by_multiplier, by_both };

/// c += a · b over bytes: a word of A is a product of a window, its four bytes a level and 510.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two columns of a lane: for each the words that hold the windows of its 16 rows.
template <class Codes>
struct ColumnPair {
  static constexpr int bits = Codes::bits;
  uint32_t words[2][bits];

  /// `from`: the lane's `bits` words of these columns. By a whole warp.
  __device__ __forceinline__ explicit ColumnPair(const uint32_t (&from)[bits]) {
    constexpr int second = bits == 3 ? 1 : bits / 2;  // where the second run begins
    // The last 16 bits of both runs, the first column's high; those of the lane that has the rows before.
    const uint32_t tails = bits == 3 ? from[2] : permute(from[second + bits / 2 - 1], from[bits / 2 - 1], 0x5410);
    const uint32_t before = __shfl_sync(0xFFFFFFFFu, tails, (threadIdx.x + 28) % 32);
    words[0][0] = permute(from[0], before, 0x7632);
    words[1][0] = permute(from[second], before, 0x5432);
    words[0][1] = from[0];
    words[1][1] = from[second];
    if constexpr (bits == 3) {
      words[0][2] = permute(from[2], from[0], 0x5432);
      words[1][2] = permute(from[2], from[1], 0x5410);
    }
    if constexpr (bits == 4) {
      words[0][2] = permute(from[1], from[0], 0x5432);
      words[1][2] = permute(from[3], from[2], 0x5432);
      words[0][3] = from[1];
      words[1][3] = from[3];
    }
  }

  /// The window of row `row` (0 … 15) of the lane's.
  template <int row, Shifts shifts = Shifts::by_multiplier>
  __device__ __forceinline__ uint32_t window(int column, uint32_t mask) const {
    // Word w holds the bits from 16·w of the run on, and the 16 before the first of them.
    constexpr int end = 16 + (row + 1) * bits;  // behind the 16 bits before the run
    constexpr int word = (end - 17) / 16;
    constexpr int in_word = end - 16 * word;  // of the word's 32, counted from the oldest
    static_assert(in_word > 16 && in_word <= 32 && word < bits);
    // Windows that share a shift agree in this. Masks have the shifter's pipe.
    constexpr bool turns = shifts == Shifts::by_both && row % 4 != 1 && Codes::window != 0;
    if constexpr (Codes::window == 14) {  // shifted out at both ends
      constexpr int above = in_word - Codes::window;
      const uint32_t shifted =
          turns ? turned_left<above>(words[column][word]) : shifted_left<above>(words[column][word]);
      return shifted >> (32 - Codes::window);
    }
    constexpr int shift = in_word % 8;
    constexpr int last_byte = (32 - (in_word - shift)) / 8;
    const uint32_t shifted =
        turns && shift != 0 ? turned_left<shift>(words[column][word]) : words[column][word] * (1u << shift);
    const uint32_t window = permute(shifted, 0, last_byte == 0 ? 0x4410u : last_byte == 1 ? 0x4421u : 0x4432u);
    return Codes::window == 16 ? window : window & mask;
  }
  template <int row, Shifts shifts = Shifts::by_multiplier>
  __device__ __forceinline__ uint32_t product(int column, uint32_t mask) const {
    return window<row, shifts>(column, mask) * formats::trellis_multiplier;
  }
};

using device::unroll;  // rows are constants, so that shifts and selectors are

}  // namespace w4q::kernels::trellis
