// What the maps of integer layouts share: places of bits, and the proof that a map is one-to-one on a tile.
//
// A map is made from (bits, n, k, groups of a row) and has
//
//   padded_rows, padded_cols     the size with padding
//   code_bit(row, col, bit)      where a bit of a code stands in the codes plane; with act order `col` counts inputs in
//                                the order in which the layout takes them
//   scale(row, group)            the index of a scale
//   zero_bit(row, group, bit)    where a bit of a zero point stands in the zeros plane
//   padded_zero_rows             only where zeros are padded further than the rest
//   word(row, word)              only where canonical words move whole: where word `word` of output `row` stands
//   tile_rows, tile_cols         where codes move by tiles: codes whose words are theirs alone, each code inside one
//                                word; the padded size is a whole number of tiles
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::repack {

struct BitAt {
  int64_t word;
  int bit;
};

W4Q_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/// Where field j of 2·half stands when the even fields come first: {0, 4, 1, 5, 2, 6, 3, 7}[j] for half = 4. Kernels of
/// AWQ and Marlin take fields from the two halves of a word at once, and so find neighbours together.
W4Q_HOST_DEVICE constexpr int even_first(int j, int half) { return j % 2 * half + j / 2; }

/// Outputs in a row of the zeros plane.
template <class Map>
constexpr int64_t zero_rows(const Map& map) {
  if constexpr (requires { map.padded_zero_rows; }) {
    return map.padded_zero_rows;
  } else {
    return map.padded_rows;
  }
}

namespace detail {

/// Every bit of the words of a padded matrix of at most 1024 codes is taken exactly once.
template <class Map>
constexpr bool codes_are_bijective(const Map& map) {
  uint32_t taken[256] = {};
  const int64_t words = map.padded_rows * map.padded_cols * map.bits / 32;
  for (int64_t row = 0; row < map.padded_rows; ++row) {
    for (int64_t col = 0; col < map.padded_cols; ++col) {
      for (int bit = 0; bit < map.bits; ++bit) {
        const BitAt at = map.code_bit(row, col, bit);
        if (at.word < 0 || at.word >= words || (taken[at.word] >> at.bit & 1u) != 0) return false;
        taken[at.word] |= 1u << at.bit;
      }
    }
  }
  for (int64_t word = 0; word < words; ++word) {
    if (taken[word] != 0xFFFFFFFFu) return false;
  }
  return true;
}

/// The same for the zeros and the scales of group 0 of at most 64 rows.
template <class Map>
constexpr bool zeros_are_bijective(const Map& map) {
  uint32_t taken[16] = {};
  bool scale_taken[64] = {};
  for (int64_t row = 0; row < map.padded_rows; ++row) {
    const int64_t scale = map.scale(row, 0);
    if (scale < 0 || scale >= map.padded_rows || scale_taken[scale]) return false;
    scale_taken[scale] = true;
    for (int bit = 0; bit < map.bits; ++bit) {
      const BitAt at = map.zero_bit(row, 0, bit);
      if (at.word < 0 || at.word >= map.padded_rows * map.bits / 32 || (taken[at.word] >> at.bit & 1u) != 0)
        return false;
      taken[at.word] |= 1u << at.bit;
    }
  }
  return true;
}

}  // namespace detail
}  // namespace w4q::repack
