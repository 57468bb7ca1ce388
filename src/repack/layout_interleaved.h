// interleaved: 4-bit codes in blocks of 32 inputs; the four words of a block stand together, and the blocks of
// neighbouring outputs one after the other, so that a thread that owns an output reads 32 of its codes with one 128-bit
// load next to its neighbour's.
//
//   code of (row, col)       → word ((col div 32) · n + row) · 4 + col mod 32 div 8,  nibble col mod 8
//   scale of (row, group)    → group · n + row
//   zero of (row, group)     → word group · (N/8) + row div 8,  nibble row mod 8,  N = n padded to 8
//
// k is padded to 32 (docs/layouts.md). Groups are 32, 64 or 128 inputs.
#pragma once

#include "repack/integer_map.h"

namespace w4q::repack {

struct InterleavedMap {
  static constexpr int bits = 4;
  static constexpr int64_t block_words = 4;

  int64_t padded_rows;
  int64_t padded_cols;
  int64_t padded_zero_rows;

  W4Q_HOST_DEVICE constexpr InterleavedMap(int, int64_t n, int64_t k, int64_t)
      : padded_rows(n), padded_cols(round_up(k, 32)), padded_zero_rows(round_up(n, 8)) {}

  W4Q_HOST_DEVICE constexpr int64_t word(int64_t row, int64_t word) const {
    return (word / block_words * padded_rows + row) * block_words + word % block_words;
  }
  W4Q_HOST_DEVICE constexpr BitAt code_bit(int64_t row, int64_t col, int bit) const {
    return {word(row, col / 8), static_cast<int>(col % 8) * bits + bit};
  }
  W4Q_HOST_DEVICE constexpr int64_t scale(int64_t row, int64_t group) const { return group * padded_rows + row; }
  W4Q_HOST_DEVICE constexpr BitAt zero_bit(int64_t row, int64_t group, int bit) const {
    return {group * (padded_zero_rows / 8) + row / 8, static_cast<int>(row % 8) * bits + bit};
  }
};

static_assert(detail::codes_are_bijective(InterleavedMap(4, 16, 64, 2)) &&
              detail::zeros_are_bijective(InterleavedMap(4, 16, 64, 2)));

}  // namespace w4q::repack
