// Moving codes between the canonical order and awq's eight rows by eight inputs at a time: a square of nibbles, turned.
// Sixteen whole squares, four down and four across, make a block that moves in vectors.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <type_traits>

#include "core/parallel.h"
#include "repack/code_movers.h"
#include "repack/layout_awq.h"
#include "repack/word_square.h"

namespace w4q::repack {

/// Turns a square of 8 × 8 nibbles: nibble j of word i becomes nibble i of word j.
template <class Word>
void transpose_nibbles(std::array<Word, 8>& words) noexcept {
  auto& [a, b, c, d, e, f, g, h] = words;
  exchange(a, b, 4, 0x0F0F0F0Fu), exchange(c, d, 4, 0x0F0F0F0Fu);
  exchange(e, f, 4, 0x0F0F0F0Fu), exchange(g, h, 4, 0x0F0F0F0Fu);
  exchange(a, c, 8, 0x00FF00FFu), exchange(b, d, 8, 0x00FF00FFu);
  exchange(e, g, 8, 0x00FF00FFu), exchange(f, h, 8, 0x00FF00FFu);
  exchange(a, e, 16, 0x0000FFFFu), exchange(b, f, 16, 0x0000FFFFu);
  exchange(c, g, 16, 0x0000FFFFu), exchange(d, h, 16, 0x0000FFFFu);
}

class AwqMover {
 public:
  AwqMover(const AwqMap& map, const formats::PackedWeight& shape)
      : map_(map), n_(shape.n), k_(shape.k), row_words_(formats::dense_words(shape.k, AwqMap::bits)) {}

  void pack(std::span<const uint32_t> canonical, std::span<uint32_t> packed) const {
    const auto block = [&](int64_t row, int64_t word) {
      uint32_t turned[side][8][side];  // words of a row, rows of a square, squares
      for (int64_t r = 0; r < 8; ++r) {
        turn_words(canonical.data() + (row + r) * row_words_ + word, 8 * row_words_, turned[0][place(r)], 8 * side);
      }
      for (int64_t w = 0; w < side; ++w) {
        std::array<FourWords, 8> squares;
        for (size_t i = 0; i < 8; ++i) squares[i] = load_four(turned[w][i]);
        transpose_nibbles(squares);
        uint32_t* const to = packed.data() + map_.code_bit(row, 8 * (word + w), 0).word;
        for (size_t i = 0; i < 8; ++i) store_four(to + static_cast<int64_t>(i) * map_.row_words(), squares[i]);
      }
    };
    for_each_square(block, [&](int64_t row, int64_t word, auto rows, auto cols) {
      std::array<uint32_t, 8> square{};
      const uint32_t* const from = canonical.data() + row * row_words_ + word;
      uint32_t* const to = packed.data() + map_.code_bit(row, 8 * word, 0).word;
      up_to(rows, [&](int64_t r) { square[place(r)] = from[r * row_words_]; });
      transpose_nibbles(square);
      up_to(cols, [&](int64_t c) { to[c * map_.row_words()] = square[static_cast<size_t>(c)]; });
    });
  }

  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    const auto block = [&](int64_t row, int64_t word) {
      uint32_t turned[side][8][side];
      for (int64_t w = 0; w < side; ++w) {
        std::array<FourWords, 8> squares;
        const uint32_t* const from = packed.data() + map_.code_bit(row, 8 * (word + w), 0).word;
        for (size_t i = 0; i < 8; ++i) squares[i] = load_four(from + static_cast<int64_t>(i) * map_.row_words());
        transpose_nibbles(squares);
        for (size_t i = 0; i < 8; ++i) store_four(turned[w][i], squares[i]);
      }
      for (int64_t r = 0; r < 8; ++r) {
        turn_words(turned[0][place(r)], 8 * side, canonical.data() + (row + r) * row_words_ + word, 8 * row_words_);
      }
    };
    for_each_square(block, [&](int64_t row, int64_t word, auto rows, auto cols) {
      std::array<uint32_t, 8> square{};
      const uint32_t* const from = packed.data() + map_.code_bit(row, 8 * word, 0).word;
      uint32_t* const to = canonical.data() + row * row_words_ + word;
      up_to(cols, [&](int64_t c) { square[static_cast<size_t>(c)] = from[c * map_.row_words()]; });
      transpose_nibbles(square);
      up_to(rows, [&](int64_t r) { to[r * row_words_] = square[place(r)]; });
    });
  }

 private:
  /// Rows, and canonical words of a row, of one task: its lines on both sides stay in the cache until they are whole.
  static constexpr int64_t task_rows = 128;
  static constexpr int64_t task_words = 16;
  static constexpr int64_t side = 4;  ///< squares of a block, down and across

  static size_t place(int64_t row) noexcept { return static_cast<size_t>(even_first(static_cast<int>(row), 4)); }

  /// Calls block(row, canonical word) for every whole block, and body(row, canonical word, rows, inputs) for the
  /// squares that are in none.
  template <class Block, class Body>
  void for_each_square(const Block& block, const Body& body) const {
    const int64_t strips = (row_words_ + task_words - 1) / task_words;
    parallel_for((n_ + task_rows - 1) / task_rows * strips, 8, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first_row = task / strips * task_rows, row_end = std::min(first_row + task_rows, n_);
        const int64_t first_word = task % strips * task_words, word_end = std::min(first_word + task_words, row_words_);
        for (int64_t row = first_row; row < row_end; row += 8 * side) {
          for (int64_t word = first_word; word < word_end; word += side) {
            if (n_ - row >= 8 * side && k_ - 8 * word >= 8 * side) {
              block(row, word);
            } else {
              squares_of(row, std::min(row + 8 * side, row_end), word, std::min(word + side, word_end), body);
            }
          }
        }
      }
    });
  }

  template <class Body>
  void squares_of(int64_t first_row, int64_t row_end, int64_t first_word, int64_t word_end, const Body& body) const {
    for (int64_t row = first_row; row < row_end; row += 8) {
      for (int64_t word = first_word; word < word_end; ++word) {
        body(row, word, std::min<int64_t>(8, n_ - row), std::min<int64_t>(8, k_ - 8 * word));
      }
    }
  }

  const AwqMap& map_;
  int64_t n_, k_, row_words_;
};

template <>
struct CodeMovers<AwqMap> {
  template <class Body>
  static void with(const AwqMap& map, const formats::PackedWeight& weight, const Body& body) {
    body(AwqMover(map, weight));
  }
};

}  // namespace w4q::repack
