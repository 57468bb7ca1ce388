// Codes that the four lanes of a quad hand to each other, so that activations are read in the order in which they
// stand. In kbit-fragment lane c of a quad has, of every 32 inputs, the eight from 8·c on: four pairs. Where inputs
// are in order, product columns 2·c and 2·c + 1 of piece q are inputs 8·q + 2·c and the next: pair c of what lane q
// has. So pairs are transposed, with those of rows g and g + 8 side by side, before they are decoded: four codes or more
// travel in a word.
#pragma once

#include <cstdint>

namespace w4q::kernels::wgmma {

/// What a lane hands to the one whose number differs from its own by bit `bit`, and gets in its place. The lane with 0
/// there keeps what comes first and hands over what comes second; the other one the other way round.
template <int bit>
struct QuadExchange {
  bool second = (threadIdx.x & bit) != 0;  ///< this lane keeps what comes second

  __device__ __forceinline__ static uint32_t hand_over(uint32_t word) {
    return __shfl_xor_sync(0xFFFFFFFFu, word, bit);
  }
  __device__ __forceinline__ void words(uint32_t& a, uint32_t& b) const {
    const uint32_t other = hand_over(second ? a : b);
    a = second ? other : a;
    b = second ? b : other;
  }
  /// The halves of each of two words.
  __device__ __forceinline__ void halves(uint32_t& a, uint32_t& b) const {
    const uint32_t other = hand_over(__byte_perm(a, b, second ? 0x5410 : 0x7632));
    a = __byte_perm(a, other, second ? 0x3254 : 0x5410);
    b = __byte_perm(b, other, second ? 0x3276 : 0x7610);
  }
  /// The bytes of each half of two words.
  __device__ __forceinline__ void bytes(uint32_t& a, uint32_t& b) const {
    const uint32_t other = hand_over(__byte_perm(a, b, second ? 0x6420 : 0x7531));
    a = __byte_perm(a, other, second ? 0x3514 : 0x5240);
    b = __byte_perm(b, other, second ? 0x3716 : 0x7260);
  }
};

/// Whether codes of so many bits can be turned. Pairs of 5-bit codes are not whole bytes.
constexpr bool can_turn(int bits) { return bits != 5; }
/// Words of a row tile once they are turned: at 3 bits the fourth step has one of its own.
constexpr int turned_words(int bits) { return bits == 3 ? 4 : bits; }

/// Turns the words of a row tile; all lanes of a warp. A pair of both rows is a byte of one word at 2 bits, half a word
/// at 3 and 4 (index bytes of the table of pairs) and a word at 8.
template <int bits>
__device__ __forceinline__ void turn_codes(uint32_t (&words)[turned_words(bits)]) {
  const QuadExchange<2> far;
  const QuadExchange<1> near;
  if constexpr (bits == 2) {
    far.halves(words[0], words[1]);
    near.bytes(words[0], words[1]);
  } else if constexpr (bits == 8) {
#pragma unroll
    for (int block = 0; block < 8; block += 4) {
      far.words(words[block], words[block + 2]);
      far.words(words[block + 1], words[block + 3]);
      near.words(words[block], words[block + 1]);
      near.words(words[block + 2], words[block + 3]);
    }
  } else {
#pragma unroll
    for (int block = 0; block < 4; block += 2) {
      far.words(words[block], words[block + 1]);
      near.halves(words[block], words[block + 1]);
    }
  }
}

}  // namespace w4q::kernels::wgmma
