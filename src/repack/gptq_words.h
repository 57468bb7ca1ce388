// Moving codes between the canonical order and gptq's: the matrix of words is turned, four by four.
#pragma once

#include <algorithm>
#include <span>

#include "core/parallel.h"
#include "repack/code_movers.h"
#include "repack/layout_gptq.h"
#include "repack/word_square.h"

namespace w4q::repack {

class GptqMover {
 public:
  GptqMover(const GptqMap& map, const formats::PackedWeight& shape)
      : map_(map), n_(shape.n), row_words_(formats::dense_words(shape.k, shape.scheme.bits)) {}

  void pack(std::span<const uint32_t> canonical, std::span<uint32_t> packed) const {
    turn(canonical.data(), row_words_, n_, row_words_, packed.data(), map_.padded_rows);
  }
  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    turn(packed.data(), map_.padded_rows, row_words_, n_, canonical.data(), row_words_);
  }

 private:
  /// lines × words → words × lines, in areas whose lines stay in the cache on both sides.
  static void turn(const uint32_t* from, int64_t from_step, int64_t lines, int64_t words, uint32_t* to,
                   int64_t to_step) {
    constexpr int64_t area = 64;
    const int64_t strips = (words + area - 1) / area;
    parallel_for((lines + area - 1) / area * strips, 4, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t line = task / strips * area, word = task % strips * area;
        const int64_t line_end = std::min(line + area, lines), word_end = std::min(word + area, words);
        for (int64_t w = word; w < word_end; w += 4) {
          for (int64_t l = line; l < line_end; l += 4) {
            if (w + 4 <= word_end && l + 4 <= line_end) {
              turn_words(from + l * from_step + w, from_step, to + w * to_step + l, to_step);
            } else {
              turn_rest(from + l * from_step + w, from_step, line_end - l, word_end - w, to + w * to_step + l, to_step);
            }
          }
        }
      }
    });
  }

  /// A square at the edge: as much of it as there is.
  static void turn_rest(const uint32_t* from, int64_t from_step, int64_t lines, int64_t words, uint32_t* to,
                        int64_t to_step) noexcept {
    for (int64_t l = 0; l < std::min<int64_t>(4, lines); ++l) {
      for (int64_t w = 0; w < std::min<int64_t>(4, words); ++w) to[w * to_step + l] = from[l * from_step + w];
    }
  }

  const GptqMap& map_;
  int64_t n_, row_words_;
};

template <>
struct CodeMovers<GptqMap> {
  template <class Body>
  static void with(const GptqMap& map, const formats::PackedWeight& weight, const Body& body) {
    body(GptqMover(map, weight));
  }
};

}  // namespace w4q::repack
