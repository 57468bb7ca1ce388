// trellis-fragment: rings of trellises in the order in which tensor cores read them. The matrix is cut into tiles of a
// strip (128 outputs, the weights of a ring) × 64 inputs, inputs first; a tile is what one warp decodes in one step.
//
// Lane = 4·g + t of a tile holds the 16 columns 16·t … 16·t + 15, of each the symbols of the 16 rows 16·g … 16·g + 15: a
// run of 16·bits bits, the oldest first. So a lane's activations are 16 neighbours, its windows need of other lanes only
// the last 16 bits of the run before, which lane (lane + 28) mod 32 holds, and the rows 2·r and 2·r + 1 of all runs are
// the 16 rows of an mma, of which there are eight. Two columns 2·i and 2·i + 1 take 2·bits halves of words, so that words,
// and what one byte permutation makes of two, hold whole windows:
//
//   2 bits   word 2·i                 the run of column 2·i;  2·i + 1 that of the other
//   3 bits   words 3·i, 3·i + 1       the first 32 bits of either run;  3·i + 2 the last 16 of both, column 2·i high
//   4 bits   words 4·i, 4·i + 1       the run of column 2·i;  4·i + 2, 4·i + 3 that of the other
//
// The 8·bits words of a lane stand as 2·bits groups of four: group j of all lanes is one coalesced 128-bit load.
//
//   word = tile · 256·bits + (w div 4) · 128 + lane · 4 + w mod 4
//
// k is zero-padded to 64; rows from n on have zero symbols in every layout (docs/layouts.md). Scales stand as they are.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::repack {

struct TrellisFragmentMap {
  static constexpr int64_t tile_rows = 128;
  static constexpr int64_t tile_cols = 64;
  static constexpr int lanes = 32;
  static constexpr int lane_rows = 16, lane_cols = 16;

  int64_t row_groups = 0;  ///< ceil(n / 128)
  int64_t col_groups = 0;  ///< ceil(k / 64)

  W4Q_HOST_DEVICE constexpr TrellisFragmentMap(int64_t n, int64_t k)
      : row_groups((n + tile_rows - 1) / tile_rows), col_groups((k + tile_cols - 1) / tile_cols) {}

  W4Q_HOST_DEVICE static constexpr int64_t tile_words(int bits) { return int64_t{256} * bits; }
  W4Q_HOST_DEVICE constexpr int64_t tiles() const { return row_groups * col_groups; }
  W4Q_HOST_DEVICE constexpr int64_t tile(int64_t row, int64_t col) const {
    return row / tile_rows * col_groups + col / tile_cols;
  }
  /// Word `w` of a lane, in its tile.
  W4Q_HOST_DEVICE static constexpr int word_at(int lane, int w) { return w / 4 * 128 + lane * 4 + w % 4; }

  struct Bit {
    int64_t word;
    int bit;
  };
  /// Bit `at` of a run, 0 the oldest, among the words of its lane; `column` of the lane's 16.
  W4Q_HOST_DEVICE static constexpr Bit run_bit(int bits, int column, int at) {
    if (bits != 3) return {bits / 2 * column + at / 32, 31 - at % 32};
    if (at < 32) return {3 * (column / 2) + column % 2, 31 - at};
    return {3 * (column / 2) + 2, 31 - 16 * (column % 2) - (at - 32)};
  }
  /// Bit `bit` of the symbol of a weight, 0 the newest.
  W4Q_HOST_DEVICE constexpr Bit symbol_bit(int bits, int64_t row, int64_t col, int bit) const {
    const int r = static_cast<int>(row % tile_rows), c = static_cast<int>(col % tile_cols);
    const int lane = 4 * (r / lane_rows) + c / lane_cols;
    const Bit in_lane = run_bit(bits, c % lane_cols, (r % lane_rows + 1) * bits - 1 - bit);
    return {tile(row, col) * tile_words(bits) + word_at(lane, static_cast<int>(in_lane.word)), in_lane.bit};
  }
};

/// 32 rows of two neighbouring columns: `bits` words of the ring of either, and as many of the two lanes that have them.
template <int bits>
struct TrellisSquare {
  uint32_t first[bits], second[bits];  ///< of rings, from word bits · (row div 32) on
  uint32_t even[bits], odd[bits];  ///< of lanes 4·g + t, g even and odd, from word bits · (column mod 16 div 2) on

  W4Q_HOST_DEVICE constexpr void to_lanes() {
    if constexpr (bits == 3) {
      for (int second_column = 0; second_column < 2; ++second_column) {
        const uint32_t* const ring = second_column != 0 ? second : first;
        even[second_column] = ring[0];
        odd[second_column] = ring[1] << 16 | ring[2] >> 16;
      }
      even[2] = (first[1] & 0xFFFF0000u) | second[1] >> 16;
      odd[2] = first[2] << 16 | (second[2] & 0xFFFFu);
    } else {
      for (int w = 0; w < bits / 2; ++w) {
        even[w] = first[w], odd[w] = first[bits / 2 + w];
        even[bits / 2 + w] = second[w], odd[bits / 2 + w] = second[bits / 2 + w];
      }
    }
  }
  W4Q_HOST_DEVICE constexpr void to_rings() {
    if constexpr (bits == 3) {
      first[0] = even[0], second[0] = even[1];
      first[1] = (even[2] & 0xFFFF0000u) | odd[0] >> 16;
      second[1] = even[2] << 16 | odd[1] >> 16;
      first[2] = odd[0] << 16 | odd[2] >> 16;
      second[2] = odd[1] << 16 | (odd[2] & 0xFFFFu);
    } else {
      for (int w = 0; w < bits / 2; ++w) {
        first[w] = even[w], first[bits / 2 + w] = odd[w];
        second[w] = even[bits / 2 + w], second[bits / 2 + w] = odd[bits / 2 + w];
      }
    }
  }
};

namespace detail {

/// Every bit of the words that hold 16 columns of a tile is taken exactly once. (Not the whole tile: compilers limit the
/// steps of a constant expression; the law tests run over whole weights.)
constexpr bool trellis_lanes_are_bijection(int bits) {
  const TrellisFragmentMap map(TrellisFragmentMap::tile_rows, TrellisFragmentMap::tile_cols);
  uint32_t taken[256 * 4] = {};
  for (int64_t row = 0; row < 64; ++row) {
    for (int64_t col = 48; col < 64; ++col) {
      for (int bit = 0; bit < bits; ++bit) {
        const auto at = map.symbol_bit(bits, row, col, bit);
        if ((taken[at.word] >> at.bit & 1u) != 0) return false;
        taken[at.word] |= 1u << at.bit;
      }
    }
  }
  for (int lane = 3; lane < 16; lane += 4) {
    for (int w = 0; w < 8 * bits; ++w) {
      if (taken[TrellisFragmentMap::word_at(lane, w)] != 0xFFFFFFFFu) return false;
    }
  }
  return true;
}
static_assert(trellis_lanes_are_bijection(2) && trellis_lanes_are_bijection(3) && trellis_lanes_are_bijection(4));

/// Moving words moves every bit to where the map has it.
template <int bits>
constexpr bool trellis_square_is_map() {
  for (int row = 0; row < 32; ++row) {
    for (int bit = 0; bit < bits; ++bit) {
      const int at = (row + 1) * bits - 1 - bit;
      TrellisSquare<bits> square{};
      square.second[at / 32] = 1u << (31 - at % 32);
      square.to_lanes();
      const auto place = TrellisFragmentMap::run_bit(bits, 1, (row % 16 + 1) * bits - 1 - bit);
      if ((row < 16 ? square.even : square.odd)[place.word] != 1u << place.bit) return false;
      const uint32_t was = square.second[at / 32];
      square.second[at / 32] = 0;
      square.to_rings();
      if (square.second[at / 32] != was) return false;
    }
  }
  return true;
}
static_assert(trellis_square_is_map<2>() && trellis_square_is_map<3>() && trellis_square_is_map<4>());

}  // namespace detail
}  // namespace w4q::repack
