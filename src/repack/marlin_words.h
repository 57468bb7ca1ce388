// Moving codes between the canonical order and marlin's tiles by whole words, without act order. A tile's column of
// lanes takes the words of two rows eight apart, and turns a small square of their bytes.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "core/parallel.h"
#include "repack/code_movers.h"
#include "repack/layout_marlin.h"

namespace w4q::repack {
namespace detail {

/// Turns a square of 4 × 4 bytes: byte j of word i becomes byte i of word j.
inline void transpose_bytes(std::array<uint32_t, 4>& words) noexcept {
  auto& [a, b, c, d] = words;
  exchange(a, b, 8, 0x00FF00FFu), exchange(c, d, 8, 0x00FF00FFu);
  exchange(a, c, 16, 0x0000FFFFu), exchange(b, d, 16, 0x0000FFFFu);
}

constexpr uint32_t low_nibbles = 0x0F0F0F0Fu;

/// Low nibbles of two words side by side, and high nibbles; its own inverse.
inline void interleave_nibbles(uint32_t& a, uint32_t& b) noexcept {
  const uint32_t low = (a & low_nibbles) | (b & low_nibbles) << 4;
  b = (a >> 4 & low_nibbles) | (b & ~low_nibbles);
  a = low;
}

/// Four-bit codes of 16 inputs of the rows r and r + 8, two words each, and what four lanes read of them.
struct MarlinSquare4 {
  static constexpr int64_t row_words = 2;
  static constexpr int64_t rows = 2;
  /// in[row][word] → out[lane mod 4]
  static std::array<uint32_t, 4> pack(const std::array<uint32_t, 4>& in) noexcept {
    std::array<uint32_t, 4> square = {in[0], in[2], in[1], in[3]};  // low and high words of both rows
    interleave_nibbles(square[0], square[2]);
    interleave_nibbles(square[1], square[3]);
    transpose_bytes(square);
    return square;
  }
  static std::array<uint32_t, 4> unpack(std::array<uint32_t, 4> square) noexcept {
    transpose_bytes(square);
    interleave_nibbles(square[0], square[2]);
    interleave_nibbles(square[1], square[3]);
    return {square[0], square[2], square[1], square[3]};
  }
  /// The word of the tile that lane 4·c + q reads for rows 16·j + c and 8 more.
  static size_t word(int64_t j, int64_t c, int64_t, int64_t q) noexcept {
    return static_cast<size_t>(4 * (4 * c + q) + j);
  }
};

/// Eight-bit codes of 16 inputs of one row, four words.
struct MarlinSquare8 {
  static constexpr int64_t row_words = 4;
  static constexpr int64_t rows = 1;
  static std::array<uint32_t, 4> pack(const std::array<uint32_t, 4>& in) noexcept {
    std::array<uint32_t, 4> out;
    for (size_t q = 0; q < 4; ++q) {
      const uint32_t low = in[q / 2] >> (q % 2 * 16);       // inputs 2q and 2q + 1
      const uint32_t high = in[2 + q / 2] >> (q % 2 * 16);  // eight further
      out[q] = (low & 0xFFu) | (high & 0xFFu) << 8 | (low & 0xFF00u) << 8 | (high & 0xFF00u) << 16;
    }
    return out;
  }
  static std::array<uint32_t, 4> unpack(const std::array<uint32_t, 4>& words) noexcept {
    std::array<uint32_t, 4> out{};
    for (size_t q = 0; q < 4; ++q) {
      const uint32_t low = (words[q] & 0xFFu) | (words[q] >> 8 & 0xFF00u);
      const uint32_t high = (words[q] >> 8 & 0xFFu) | (words[q] >> 16 & 0xFF00u);
      out[q / 2] |= low << (q % 2 * 16);
      out[2 + q / 2] |= high << (q % 2 * 16);
    }
    return out;
  }
  static size_t word(int64_t j, int64_t c, int64_t upper, int64_t q) noexcept {
    return static_cast<size_t>(8 * (4 * c + q) + 2 * j + upper);
  }
};

}  // namespace detail

template <class Square>
class MarlinMover {
 public:
  MarlinMover(const MarlinMap& map, const formats::PackedWeight& shape)
      : map_(map), n_(shape.n), row_words_(formats::dense_words(shape.k, shape.scheme.bits)) {}

  void pack(std::span<const uint32_t> canonical, std::span<uint32_t> packed) const {
    for_each_square(packed.data(), [&](int64_t from, uint32_t* tile, auto target, auto rows, auto words) {
      std::array<uint32_t, 4> in{};
      up_to(rows,
            [&](int64_t r) { up_to(words, [&](int64_t w) { in[index(r, w)] = canonical[offset(from, r, w)]; }); });
      const auto out = Square::pack(in);
      up_to(whole<4>, [&](int64_t q) { tile[target(q)] = out[static_cast<size_t>(q)]; });
    });
  }

  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    for_each_square(packed.data(), [&](int64_t to, const uint32_t* tile, auto target, auto rows, auto words) {
      std::array<uint32_t, 4> in;
      up_to(whole<4>, [&](int64_t q) { in[static_cast<size_t>(q)] = tile[target(q)]; });
      const auto out = Square::unpack(in);
      up_to(rows, [&](int64_t r) { up_to(words, [&](int64_t w) { canonical[offset(to, r, w)] = out[index(r, w)]; }); });
    });
  }

 private:
  static constexpr int64_t task_tiles = 16;
  template <int64_t count>
  static constexpr std::integral_constant<int64_t, count> whole{};

  /// Word w of row r of a square, in the square and in the canonical plane.
  static size_t index(int64_t r, int64_t w) noexcept { return static_cast<size_t>(r * Square::row_words + w); }
  size_t offset(int64_t first, int64_t r, int64_t w) const noexcept {
    return static_cast<size_t>(first + 8 * r * row_words_ + w);
  }

  /// Calls body(first canonical word, tile, q → word of the tile, rows, words of a row) for every square that holds
  /// codes; the sizes of a whole one are constants.
  template <class Word, class Body>
  void for_each_square(Word* packed, const Body& body) const {
    const int64_t tiles = map_.padded_cols / MarlinMap::tile_cols;
    const int64_t runs = (tiles + task_tiles - 1) / task_tiles;
    parallel_for(map_.padded_rows / MarlinMap::tile_rows * runs, 4, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / runs * MarlinMap::tile_rows;
        const int64_t last = std::min((task % runs + 1) * task_tiles, tiles);
        for (int64_t tile = task % runs * task_tiles; tile < last; ++tile) {
          one_tile(body, row, tile, packed + map_.code_bit(row, tile * MarlinMap::tile_cols, 0).word);
        }
      }
    });
  }

  template <class Body, class Word>
  void one_tile(const Body& body, int64_t first_row, int64_t tile, Word* tile_words) const {
    const int64_t word = tile * Square::row_words;
    const int64_t words = std::min(Square::row_words, row_words_ - word);
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t upper = 0; upper < 2 / Square::rows; ++upper) {
        for (int64_t c = 0; c < 8; ++c) {
          const int64_t row = first_row + 16 * j + 8 * upper + c;
          if (row >= n_) break;
          const int64_t rows = row + 8 * (Square::rows - 1) < n_ ? Square::rows : 1;
          const auto target = [=](int64_t q) { return Square::word(j, c, upper, q); };
          if (rows == Square::rows && words == Square::row_words) {
            body(row * row_words_ + word, tile_words, target, whole<Square::rows>, whole<Square::row_words>);
          } else {
            body(row * row_words_ + word, tile_words, target, rows, words);
          }
        }
      }
    }
  }

  const MarlinMap& map_;
  int64_t n_, row_words_;
};

template <>
struct CodeMovers<MarlinMap> {
  template <class Body>
  static void with(const MarlinMap& map, const formats::PackedWeight& weight, const Body& body) {
    if (weight.scheme.act_order) return with_tiles(map, weight, body);
    if (map.bits == 4) return body(MarlinMover<detail::MarlinSquare4>(map, weight));
    body(MarlinMover<detail::MarlinSquare8>(map, weight));
  }
};

}  // namespace w4q::repack
