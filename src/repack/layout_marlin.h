// marlin: the order in which Marlin's kernels read 4- and 8-bit codes, in IST-DASLab's checkpoints and in vLLM's
// memory. Tiles of 16 inputs × 64 outputs; in a tile, lane L = 4·(c mod 8) + (r mod 8) div 2 of a warp holds the codes
// that one mma.m16n8k16 step takes from it, for input r and output c of the tile:
//
//   4 bits: word 4·L + c div 16,                      nibble even_first(4·(c mod 16 div 8) + 2·(r div 8) + r mod 2)
//   8 bits: word 8·L + 2·(c div 16) + c mod 16 div 8, byte   even_first(2·(r div 8) + r mod 2)
//
// after word (input tile) · (N·bits/2) + (output tile) · 32·bits. Scales stand by group, in runs of outputs that are
// permuted so that a lane's scales are neighbours: with several groups in runs of 64, output c at 8·(c mod 8) + c div
// 8; with a single group in runs of 32, at 8·(c mod 8 div 2) + 2·(c div 8) + c mod 2. Zero points take the first of the
// two orders, then even_first within the fields of a word. N = n padded to 64; k is padded to 16 (docs/layouts.md).
//
// With act order the inputs stand in the stable order of their groups, so that a group's inputs are neighbours.
#pragma once

#include "repack/integer_map.h"

namespace w4q::repack {

struct MarlinMap {
  static constexpr int64_t tile_rows = 64;
  static constexpr int64_t tile_cols = 16;

  int bits;
  int64_t padded_rows;
  int64_t padded_cols;
  bool single_group;

  W4Q_HOST_DEVICE constexpr MarlinMap(int bits_, int64_t n, int64_t k, int64_t groups)
      : bits(bits_),
        padded_rows(round_up(n, tile_rows)),
        padded_cols(round_up(k, tile_cols)),
        single_group(groups == 1) {}

  /// Words of one row of tiles.
  W4Q_HOST_DEVICE constexpr int64_t row_words() const { return padded_rows * bits / 2; }
  W4Q_HOST_DEVICE constexpr int64_t zero_words() const { return padded_rows * bits / 32; }

  W4Q_HOST_DEVICE constexpr BitAt code_bit(int64_t row, int64_t col, int bit) const {
    const int r = static_cast<int>(col % tile_cols);
    const int c = static_cast<int>(row % tile_rows);
    const int lane = 4 * (c % 8) + r % 8 / 2;
    const int upper = c % 16 / 8;
    const int pair = 2 * (r / 8) + r % 2;
    const int64_t tile = col / tile_cols * row_words() + row / tile_rows * (32 * bits);
    if (bits == 4) return {tile + 4 * lane + c / 16, 4 * even_first(4 * upper + pair, 4) + bit};
    return {tile + 8 * lane + 2 * (c / 16) + upper, 8 * even_first(pair, 2) + bit};
  }

  W4Q_HOST_DEVICE constexpr int64_t scale(int64_t row, int64_t group) const {
    return group * padded_rows + (single_group ? single_order(row) : group_order(row));
  }

  W4Q_HOST_DEVICE constexpr BitAt zero_bit(int64_t row, int64_t group, int bit) const {
    const int fields = 32 / bits;
    const int64_t at = group_order(row);
    const int field = even_first(static_cast<int>(at % fields), fields / 2);
    return {group * zero_words() + at / fields, field * bits + bit};
  }

  /// Where the scale of an output stands if all inputs are one group.
  template <class Int>
  W4Q_HOST_DEVICE static constexpr Int single_order(Int row) {
    const Int c = row % 32;
    return row - c + 8 * (c % 8 / 2) + 2 * (c / 8) + c % 2;
  }

 private:
  W4Q_HOST_DEVICE static constexpr int64_t group_order(int64_t row) {
    const int64_t c = row % 64;
    return row - c + 8 * (c % 8) + c / 8;
  }
};

static_assert(detail::codes_are_bijective(MarlinMap(4, 64, 16, 1)));
static_assert(detail::codes_are_bijective(MarlinMap(8, 64, 16, 1)));
static_assert(detail::zeros_are_bijective(MarlinMap(4, 64, 16, 1)) &&
              detail::zeros_are_bijective(MarlinMap(8, 64, 16, 1)));
static_assert(detail::zeros_are_bijective(MarlinMap(4, 64, 16, 2)) &&
              detail::zeros_are_bijective(MarlinMap(8, 64, 16, 2)));

}  // namespace w4q::repack
