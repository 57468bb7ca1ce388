// The bits of one tile of kbit-fragment on the CPU, by the widest instructions of the machine. Every instruction set
// gives the same words (class E0).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "repack/layout_kbit_fragment.h"

namespace w4q::repack {

/// The plane words of a tile, 64 rows × 2 blocks, with the four words that share a lane's bytes next to each other.
struct KbitTilePlanes {
  static constexpr size_t plane_words = 128;
  alignas(64) std::array<uint32_t, 5 * plane_words> words;

  /// Where the word of plane 0 of a block stands; those of the other planes follow every `plane_words`.
  static constexpr size_t index(size_t row, size_t block) {
    const size_t row_tile = row / 16, half = row / 8 % 2, g = row % 8;
    return row_tile * 32 + g * 4 + 2 * block + half;
  }
};

/// The 128 · bits words of the tile in the layout from its planes, and back.
void pack_kbit_fragment_tile(int bits, const KbitTilePlanes& planes, uint32_t* words) noexcept;
void unpack_kbit_fragment_tile(int bits, const uint32_t* words, KbitTilePlanes& planes) noexcept;

}  // namespace w4q::repack
