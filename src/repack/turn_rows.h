// Two weights whose rows take turns, eight of each, made out of the words of both in a layout: what packing the stacked
// canonical rows gives. In layouts with tiles of 64 outputs a lane's words hold, for each of four row tiles of 16, the
// rows g (half 0) and g + 8 (half 1): an eight of rows is a half of a row tile. So tile S of both weights becomes the
// tiles 2·S and 2·S + 1 of the result; row tile r of tile 2·S + t takes its half 0 from the first weight and its half 1
// from the second, both from half r mod 2 of row tile 2·t + r div 2.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::repack {

/// Rows of each that stand together.
inline constexpr int64_t turn_rows = 8;

/// The row of its own weight that row `row` of the result is, and whether that is the second.
W4Q_HOST_DEVICE constexpr int64_t turned_from(int64_t row) {
  return row / (2 * turn_rows) * turn_rows + row % turn_rows;
}
W4Q_HOST_DEVICE constexpr bool turned_to_second(int64_t row) { return row / turn_rows % 2 != 0; }

/// Words whose halves alternate in units of `unit` bits.
W4Q_HOST_DEVICE constexpr uint32_t join_units(uint32_t first, uint32_t second, int unit, int half) {
  const uint32_t even = unit == 4 ? 0x0F0F0F0Fu : unit == 8 ? 0x00FF00FFu : 0x0000FFFFu;
  return ((first >> (half * unit)) & even) | (((second >> (half * unit)) & even) << unit);
}

/// The words of a lane and row tile in kbit-fragment: pair p of codes is of half p mod 2 (layout_kbit_fragment.h).
template <int bits>
struct FragmentLane {
  static constexpr int words = bits;                               ///< of a row tile
  static constexpr int quads = bits;                               ///< 128-bit loads of a lane
  static constexpr int unit = bits == 2 ? 4 : bits == 8 ? 16 : 8;  ///< bits of a pair, or the byte that it is in
  W4Q_HOST_DEVICE static constexpr int quad(int j, int lane) { return 32 * j + lane; }

  W4Q_HOST_DEVICE static constexpr void join(const uint32_t* first, const uint32_t* second, int half, uint32_t* to) {
    if constexpr (bits == 5) {
      for (int w = 0; w < words; ++w) to[w] = 0;
      join_pairs<0>(first, second, half, to);
    } else {
      for (int w = 0; w < words; ++w) to[w] = join_units(first[w], second[w], unit, half);
    }
  }

 private:
  /// A function for each pair: compilers do not unroll a loop over them.
  template <int p>
  W4Q_HOST_DEVICE static constexpr void join_pairs(const uint32_t* first, const uint32_t* second, int half,
                                                   uint32_t* to) {
    put(to, p, half == 0 ? pair(first, p) : pair(first, p + 1));
    put(to, p + 1, half == 0 ? pair(second, p) : pair(second, p + 1));
    if constexpr (p < 14) join_pairs<p + 2>(first, second, half, to);
  }
  /// Of 5 bits: pair 15 stands at the tops of all words.
  W4Q_HOST_DEVICE static constexpr uint32_t pair(const uint32_t* w, int p) {
    if (p < 15) return (w[p / 3] >> (p % 3 * 10)) & 0x3FF;
    uint32_t codes = 0;
    for (int j = 0; j < words; ++j) codes |= (w[j] >> 30) << (2 * j);
    return codes;
  }
  W4Q_HOST_DEVICE static constexpr void put(uint32_t* w, int p, uint32_t codes) {
    if (p < 15) {
      w[p / 3] |= codes << (p % 3 * 10);
      return;
    }
    for (int j = 0; j < words; ++j) w[j] |= (codes >> (2 * j) & 3) << 30;
  }
};

/// The same of Marlin's tiles (layout_marlin.h): a word of 4 bits has half 0 in bytes 0 and 2, of 8 bits a word each.
template <int bits>
struct MarlinLane {
  static constexpr int words = bits / 4;
  static constexpr int quads = bits / 4;
  W4Q_HOST_DEVICE static constexpr int quad(int j, int lane) { return quads * lane + j; }

  W4Q_HOST_DEVICE static constexpr void join(const uint32_t* first, const uint32_t* second, int half, uint32_t* to) {
    if constexpr (bits == 4) {
      to[0] = join_units(first[0], second[0], 8, half);
    } else {
      to[0] = first[half];
      to[1] = second[half];
    }
  }
};

/// All words of a lane, of a tile of either weight, to those of the two tiles that they become.
template <class Lane>
W4Q_HOST_DEVICE constexpr void turn_lane(const uint32_t* first, const uint32_t* second, uint32_t* low, uint32_t* high) {
  for (int r = 0; r < 4; ++r) {
    const int low_from = r / 2 * Lane::words, high_from = (2 + r / 2) * Lane::words, to = r * Lane::words;
    Lane::join(first + low_from, second + low_from, r % 2, low + to);
    Lane::join(first + high_from, second + high_from, r % 2, high + to);
  }
}

}  // namespace w4q::repack
