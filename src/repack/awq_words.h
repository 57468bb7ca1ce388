// Moving codes between the canonical order and awq's eight rows by eight inputs at a time: a square of nibbles, turned.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <type_traits>

#include "core/parallel.h"
#include "repack/code_movers.h"
#include "repack/layout_awq.h"

namespace w4q::repack {

/// Turns a square of 8 × 8 nibbles: nibble j of word i becomes nibble i of word j.
inline void transpose_nibbles(std::array<uint32_t, 8>& words) noexcept {
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
    for_each_square([&](int64_t row, int64_t word, auto rows, auto cols) {
      std::array<uint32_t, 8> square{};
      const uint32_t* const from = canonical.data() + row * row_words_ + word;
      uint32_t* const to = packed.data() + map_.code_bit(row, 8 * word, 0).word;
      up_to(rows, [&](int64_t r) { square[place(r)] = from[r * row_words_]; });
      transpose_nibbles(square);
      up_to(cols, [&](int64_t c) { to[c * map_.row_words()] = square[static_cast<size_t>(c)]; });
    });
  }

  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    for_each_square([&](int64_t row, int64_t word, auto rows, auto cols) {
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

  static size_t place(int64_t row) noexcept { return static_cast<size_t>(even_first(static_cast<int>(row), 4)); }

  /// Calls body(row, canonical word, rows, inputs) for every square; the sizes of a whole one are constants.
  template <class Body>
  void for_each_square(const Body& body) const {
    constexpr std::integral_constant<int64_t, 8> whole;
    const int64_t strips = (row_words_ + task_words - 1) / task_words;
    parallel_for((n_ + task_rows - 1) / task_rows * strips, 8, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first_row = task / strips * task_rows;
        const int64_t first_word = task % strips * task_words;
        for (int64_t row = first_row; row < std::min(first_row + task_rows, n_); row += 8) {
          for (int64_t word = first_word; word < std::min(first_word + task_words, row_words_); ++word) {
            const int64_t rows = n_ - row;
            const int64_t cols = k_ - 8 * word;
            if (rows >= 8 && cols >= 8) {
              body(row, word, whole, whole);
            } else {
              body(row, word, std::min<int64_t>(8, rows), std::min<int64_t>(8, cols));
            }
          }
        }
      }
    });
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
