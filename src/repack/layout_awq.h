// awq: the words of AutoAWQ's "gemm" checkpoints. A word holds one input of eight neighbouring outputs, the even ones
// in its low half: output 8c + j stands in nibble {0, 4, 1, 5, 2, 6, 3, 7}[j].
//
//   code of (row, col)      → word col · (N/8) + row div 8,    nibble even_first(row mod 8)
//   scale of (row, group)   → group · N + row
//   zero of (row, group)    → word group · (N/8) + row div 8,  the same nibble
//
// with N = n padded to 8 (docs/layouts.md).
#pragma once

#include "repack/integer_map.h"

namespace w4q::repack {

struct AwqMap {
  static constexpr int bits = 4;
  static constexpr int64_t tile_rows = 8;
  static constexpr int64_t tile_cols = 1;

  int64_t padded_rows;
  int64_t padded_cols;

  W4Q_HOST_DEVICE constexpr AwqMap(int, int64_t n, int64_t k, int64_t) : padded_rows(round_up(n, 8)), padded_cols(k) {}

  W4Q_HOST_DEVICE constexpr int64_t row_words() const { return padded_rows / 8; }
  W4Q_HOST_DEVICE constexpr BitAt code_bit(int64_t row, int64_t col, int bit) const {
    return {col * row_words() + row / 8, 4 * even_first(static_cast<int>(row % 8), 4) + bit};
  }
  W4Q_HOST_DEVICE constexpr int64_t scale(int64_t row, int64_t group) const { return group * padded_rows + row; }
  W4Q_HOST_DEVICE constexpr BitAt zero_bit(int64_t row, int64_t group, int bit) const {
    return code_bit(row, group, bit);
  }
};

static_assert(detail::codes_are_bijective(AwqMap(4, 64, 16, 1)) && detail::zeros_are_bijective(AwqMap(4, 64, 16, 1)));

}  // namespace w4q::repack
