// gptq: the words of GPTQ checkpoints. The dense stream of every output runs down the rows of a matrix of words, so
// that word w of output `row` stands in row w: the canonical words transposed. Zero points are a dense stream along the
// outputs of each group.
//
//   code bit b of (row, col): t = col · bits + b      → word (t div 32) · N + row, bit t mod 32
//   scale of (row, group)                             → group · N + row
//   zero bit b of (row, group): t = row · bits + b    → word group · (N · bits / 32) + t div 32, bit t mod 32
//
// with N = n padded to 32; k is padded to 32 as well, so that every stream ends with a word (docs/layouts.md).
#pragma once

#include "repack/integer_map.h"

namespace w4q::repack {

struct GptqMap {
  int bits;
  int64_t padded_rows;
  int64_t padded_cols;

  W4Q_HOST_DEVICE constexpr GptqMap(int bits_, int64_t n, int64_t k, int64_t)
      : bits(bits_), padded_rows(round_up(n, 32)), padded_cols(round_up(k, 32)) {}

  /// Words of one output.
  W4Q_HOST_DEVICE constexpr int64_t row_words() const { return padded_cols / 32 * bits; }
  W4Q_HOST_DEVICE constexpr int64_t zero_words() const { return padded_rows / 32 * bits; }
  /// Where word `word` of the canonical stream of an output stands.
  W4Q_HOST_DEVICE constexpr int64_t word(int64_t row, int64_t word) const { return word * padded_rows + row; }
  W4Q_HOST_DEVICE constexpr BitAt code_bit(int64_t row, int64_t col, int bit) const {
    const int64_t t = col * bits + bit;
    return {word(row, t / 32), static_cast<int>(t % 32)};
  }
  W4Q_HOST_DEVICE constexpr int64_t scale(int64_t row, int64_t group) const { return group * padded_rows + row; }
  W4Q_HOST_DEVICE constexpr BitAt zero_bit(int64_t row, int64_t group, int bit) const {
    const int64_t t = row * bits + bit;
    return {group * zero_words() + t / 32, static_cast<int>(t % 32)};
  }
};

static_assert(detail::codes_are_bijective(GptqMap(2, 32, 32, 1)) && detail::zeros_are_bijective(GptqMap(2, 32, 32, 1)));
static_assert(detail::codes_are_bijective(GptqMap(3, 32, 32, 1)) && detail::zeros_are_bijective(GptqMap(3, 32, 32, 1)));
static_assert(detail::codes_are_bijective(GptqMap(4, 32, 32, 1)) && detail::zeros_are_bijective(GptqMap(4, 32, 32, 1)));
static_assert(detail::codes_are_bijective(GptqMap(8, 32, 32, 1)) && detail::zeros_are_bijective(GptqMap(8, 32, 32, 1)));

}  // namespace w4q::repack
