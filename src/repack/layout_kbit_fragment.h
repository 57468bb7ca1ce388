// kbit-fragment: kbit codes in the order in which tensor cores read them. The matrix is cut into tiles of 64 outputs ×
// 64 inputs, inputs first; a tile is what one warp multiplies in one step, four times m16n8k16 over four row tiles
// of 16.
//
// Within a tile, lane = 4·g + t holds, for each row tile, the rows g and g + 8, and in each of the two scale blocks
// along k the 8 columns from 8·t on, so that a lane's activations of a block are 16 neighbouring bytes and every mma
// step stays within one scale block:
//
//   row = 16·row_tile + 8·half + g        col = 32·block + 8·t + 4·(step mod 2) + 2·upper + e,   block = step div 2
//
// `step` is the mma step, (half, upper) its A register 2·upper + half, e the element of the register. The two codes of
// a register form a pair of 2·bits bits, the first code low: the index into a table of value pairs. The 16 pairs p =
// 4·step + 2·upper + half of a row tile take `bits` words, so that a look-up costs as few instructions as possible:
//
//   2, 4 bits  pairs follow one another, low bits first: byte b of a word is a table index as it stands
//   3 bits     pair p < 12 is the low 6 bits of byte p mod 4 of word p div 4; pair 12 + b has its bits 2j, 2j + 1 at
//              the top of byte b of word j: a byte is a table index whose top two bits do not matter
//   5 bits     pair p < 15 is the 10 bits from 10·(p mod 3) on of word p div 3; pair 15 has its bits 2j, 2j + 1 at
//              the top of word j
//
// The 4·bits words of a lane stand as `bits` groups of four: group j of all lanes is one coalesced 128-bit load.
//
//   word  = tile · 128·bits + (w div 4) · 128 + lane · 4 + w mod 4,   w = row_tile · bits + word of the row tile
//   scale = tile · 128 + 16·g + 8·block + 2·row_tile + half
//
// n and k are zero-padded to 64 (docs/layouts.md).
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::repack {

struct KbitFragmentMap {
  static constexpr int64_t tile_rows = 64;
  static constexpr int64_t tile_cols = 64;
  static constexpr int64_t tile_scales = 128;
  static constexpr int lanes = 32;
  static constexpr int row_tiles = 4;  ///< of 16 rows, in a tile
  static constexpr int pairs = 16;     ///< of codes, per lane and row tile

  int64_t row_groups = 0;  ///< ceil(n / 64)
  int64_t col_groups = 0;  ///< ceil(k / 64)

  W4Q_HOST_DEVICE constexpr KbitFragmentMap(int64_t n, int64_t k)
      : row_groups((n + tile_rows - 1) / tile_rows), col_groups((k + tile_cols - 1) / tile_cols) {}

  W4Q_HOST_DEVICE static constexpr int64_t tile_words(int bits) { return int64_t{128} * bits; }
  W4Q_HOST_DEVICE constexpr int64_t tiles() const { return row_groups * col_groups; }
  W4Q_HOST_DEVICE constexpr int64_t tile(int64_t row, int64_t col) const {
    return row / tile_rows * col_groups + col / tile_cols;
  }

  /// Where a weight stands in its tile.
  struct Place {
    int lane;
    int row_tile;
    int half;  ///< 0: row g, 1: row g + 8
    int pair;
    int element;
  };
  W4Q_HOST_DEVICE static constexpr Place place(int64_t row, int64_t col) {
    const int r = static_cast<int>(row % tile_rows);
    const int c = static_cast<int>(col % tile_cols);
    const int half = r / 8 % 2;
    const int step = c / 32 * 2 + c / 4 % 2;
    return {4 * (r % 8) + c % 32 / 8, r / 16, half, 4 * step + 2 * (c / 2 % 2) + half, c % 2};
  }

  /// Where bit `bit` of pair `pair` stands in the words of its row tile.
  struct PairBit {
    int word;
    int bit;
  };
  W4Q_HOST_DEVICE static constexpr PairBit pair_bit(int bits, int pair, int bit) {
    if (bits == 3) {
      if (pair < 12) return {pair / 4, 8 * (pair % 4) + bit};
      return {bit / 2, 8 * (pair - 12) + 6 + bit % 2};
    }
    if (bits == 5 && pair == 15) return {bit / 2, 30 + bit % 2};
    const int per_word = 16 / bits;
    return {pair / per_word, pair % per_word * 2 * bits + bit};
  }

  struct Bit {
    int64_t word;
    int bit;
  };
  /// Bit `bit` of the code of a weight.
  W4Q_HOST_DEVICE constexpr Bit code_bit(int bits, int64_t row, int64_t col, int bit) const {
    const Place at = place(row, col);
    const PairBit in_words = pair_bit(bits, at.pair, at.element * bits + bit);
    const int w = at.row_tile * bits + in_words.word;
    return {tile(row, col) * tile_words(bits) + w / 4 * 128 + at.lane * 4 + w % 4, in_words.bit};
  }

  W4Q_HOST_DEVICE constexpr int64_t scale(int64_t row, int64_t col) const {
    const Place at = place(row, col);
    return tile(row, col) * tile_scales + 16 * (at.lane / 4) + 8 * (at.pair / 8) + at.row_tile * 2 + at.half;
  }
};

namespace detail {

/// Every bit of the words of one row tile is taken exactly once, and every scale by exactly its 32 weights. (One row
/// tile: compilers limit the steps of a constant expression; the law tests run over whole weights.)
constexpr bool fragment_row_tile_is_bijection(int bits) {
  const KbitFragmentMap map(KbitFragmentMap::tile_rows, KbitFragmentMap::tile_cols);
  uint32_t taken[128 * 2] = {};
  int scale_uses[KbitFragmentMap::tile_scales] = {};
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t col = 0; col < KbitFragmentMap::tile_cols; ++col) {
      ++scale_uses[map.scale(row, col)];
      if (map.scale(row, col) != map.scale(row, col / 32 * 32)) return false;
      for (int bit = 0; bit < bits; ++bit) {
        const auto at = map.code_bit(bits, row, col, bit);
        if ((taken[at.word] >> at.bit & 1u) != 0) return false;
        taken[at.word] |= 1u << at.bit;
      }
    }
  }
  for (int lane = 0; lane < KbitFragmentMap::lanes; ++lane) {
    for (int word = 0; word < bits; ++word) {
      if (taken[word / 4 * 128 + lane * 4 + word % 4] != 0xFFFFFFFFu) return false;
    }
  }
  for (const int uses : scale_uses) {
    if (uses != 0 && uses != 32) return false;
  }
  return true;
}

static_assert(fragment_row_tile_is_bijection(2) && fragment_row_tile_is_bijection(4));
static_assert(fragment_row_tile_is_bijection(3));
static_assert(fragment_row_tile_is_bijection(5));

}  // namespace detail
}  // namespace w4q::repack
