// How the bits of kbit-fragment get where layout_kbit_fragment.h puts them, as data that the passes of the CPU and of
// the GPU unroll into shifts and masks, each in its own vector type.
//
// A lane owns byte t of every plane word of its rows: 4 · bits bytes a row tile. They come in as one word a plane,
//
//   plane word p:  byte 2·block + half,  bit 4·(step mod 2) + 2·upper + e
//
// Exchanges between two words turn four such words into one a step, which hold a pair of codes in each byte:
//
//   step word s:   byte 2·upper + half,  bit 4·e + p
//
// That is the layout of 4 bits. Two bits end after exchanges of their own. 3 and 5 bits go through step words too (a
// plane 3 of zeros; plane 4 kept aside as it came) and are then moved to their places, read off the map.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "repack/layout_kbit_fragment.h"

namespace w4q::repack {

/// Swaps the bits `mask << shift` of word a with the bits `mask` of word b; undone by doing it again.
struct BitExchange {
  int a, b;
  int shift;
  uint32_t mask;
};

/// Bits `mask` of word `to` are the bits of word `from` that stand `shift` lower (a negative shift: higher).
struct BitMove {
  int from, to;
  int shift;
  uint32_t mask;
};

namespace detail {

constexpr std::array<BitExchange, 5> two_bit_exchanges{{
    {0, 1, 1, 0x55555555u},
    {0, 1, 2, 0x33333333u},
    {0, 1, 8, 0x00FF00FFu},
    {0, 1, 4, 0x0F0F0F0Fu},
    {0, 1, 16, 0x0000FFFFu},
}};

constexpr std::array<BitExchange, 8> step_exchanges{{
    {0, 1, 1, 0x55555555u},
    {2, 3, 1, 0x55555555u},
    {0, 2, 2, 0x33333333u},
    {1, 3, 2, 0x33333333u},
    {0, 1, 4, 0x0F0F0F0Fu},
    {2, 3, 4, 0x0F0F0F0Fu},
    {0, 2, 16, 0x0000FFFFu},
    {1, 3, 16, 0x0000FFFFu},
}};

struct MoveList {
  static constexpr size_t capacity = 80;
  std::array<BitMove, capacity> moves{};
  size_t count = 0;

  /// Bits of the same words that move equally far go together.
  constexpr void add(int from, int from_bit, int to, int to_bit) {
    const uint32_t mask = uint32_t{1} << to_bit;
    for (size_t i = 0; i < count; ++i) {
      BitMove& move = moves[i];
      if (move.from == from && move.to == to && move.shift == to_bit - from_bit) {
        move.mask |= mask;
        return;
      }
    }
    moves[count++] = {from, to, to_bit - from_bit, mask};
  }
};

constexpr MoveList moves_from_steps(int bits) {
  MoveList list;
  for (int pair = 0; pair < KbitFragmentMap::pairs; ++pair) {
    const int step = pair / 4, upper = pair / 2 % 2, half = pair % 2;
    for (int i = 0; i < 2 * bits; ++i) {
      const int e = i / bits, plane = i % bits;
      const auto to = KbitFragmentMap::pair_bit(bits, pair, i);
      if (plane < 4) {
        list.add(step, 8 * (2 * upper + half) + 4 * e + plane, to.word, to.bit);
      } else {
        list.add(plane, 8 * (2 * (step / 2) + half) + 4 * (step % 2) + 2 * upper + e, to.word, to.bit);
      }
    }
  }
  return list;
}

}  // namespace detail

/// What turns plane words into the words of a row tile: the exchanges in order, then the moves. `inputs` words come in
/// (the one behind the planes, if any, is zero); without moves the exchanged words are the result.
template <int bits>
struct KbitFragmentMoves {
  static constexpr bool direct = bits == 2 || bits == 4;
  static constexpr int inputs = bits < 4 ? (bits == 2 ? 2 : 4) : bits;
  static constexpr auto exchanges = [] {
    if constexpr (bits == 2) {
      return detail::two_bit_exchanges;
    } else {
      return detail::step_exchanges;
    }
  }();
  static constexpr detail::MoveList moves = direct ? detail::MoveList{} : detail::moves_from_steps(bits);
};

}  // namespace w4q::repack
