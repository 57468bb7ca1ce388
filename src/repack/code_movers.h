// Moving codes between the canonical order and a layout's: whole words where the map keeps canonical words whole,
// otherwise tile by tile through bytes, by tables read off the map. Faster ways specialize CodeMovers.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "formats/integer.h"
#include "repack/integer_map.h"

namespace w4q::repack {

/// The inputs in the stable order of their groups; empty for a weight without act order.
std::vector<int32_t> inputs_by_group(const formats::PackedWeight& weight);
/// Calls body(0) … body(count − 1), one after the other where the count is a constant.
template <class Count, class Body>
void up_to(Count count, const Body& body) {
  if constexpr (std::is_same_v<Count, int64_t>) {
    for (int64_t i = 0; i < count; ++i) body(i);
  } else {
    [&]<int64_t... i>(std::integer_sequence<int64_t, i...>) { (body(i), ...); }
    (std::make_integer_sequence<int64_t, Count::value>{});
  }
}

/// Exchanges the upper fields of one word with the lower ones of another, `shift` bits below; of several words side by
/// side where Word is a vector.
template <class Word>
void exchange(Word& low, Word& high, int shift, uint32_t mask) noexcept {
  const Word change = ((low >> shift) ^ high) & mask;
  high ^= change;
  low ^= change << shift;
}

namespace detail {

/// The words of one tile, and for each field of a word the code that it holds, as an offset into bytes of `stride`
/// codes to a row.
template <class Map, int bits>
struct TileFields {
  static constexpr size_t fields = 32 / bits;
  static constexpr size_t words = static_cast<size_t>(Map::tile_rows * Map::tile_cols) / fields;

  std::array<int64_t, words> word{};  ///< from the word of the tile's first code
  std::array<std::array<uint32_t, fields>, words> code{};

  TileFields(const Map& map, int64_t stride) {
    const int64_t base = map.code_bit(0, 0, 0).word;
    size_t known = 0;
    for (int64_t row = 0; row < Map::tile_rows; ++row) {
      for (int64_t col = 0; col < Map::tile_cols; ++col) {
        const BitAt at = map.code_bit(row, col, 0);
        const auto end = word.begin() + static_cast<std::ptrdiff_t>(known);
        const auto found = std::find(word.begin(), end, at.word - base);
        if (found == end) word[known++] = at.word - base;
        const auto index = static_cast<size_t>(found - word.begin());
        code[index][static_cast<size_t>(at.bit / bits)] = static_cast<uint32_t>(row * stride + col);
      }
    }
  }

  void pack(const uint8_t* codes, uint32_t* out) const noexcept {
    for (size_t w = 0; w < words; ++w) {
      uint32_t packed = 0;
      for (size_t f = 0; f < fields; ++f) packed |= uint32_t{codes[code[w][f]]} << (f * bits);
      out[word[w]] = packed;
    }
  }
  void unpack(const uint32_t* in, uint8_t* codes) const noexcept {
    for (size_t w = 0; w < words; ++w) {
      const uint32_t packed = in[word[w]];
      for (size_t f = 0; f < fields; ++f) {
        codes[code[w][f]] = static_cast<uint8_t>((packed >> (f * bits)) & ((1u << bits) - 1));
      }
    }
  }
};

/// Moves codes tile by tile: a task is a strip of rows by a chunk of columns, whose codes lie as bytes in between.
template <class Map, int bits>
class TileMover {
 public:
  TileMover(const Map& map, const formats::PackedWeight& shape, std::span<const int32_t> order)
      : map_(map),
        n_(shape.n),
        k_(shape.k),
        order_(order),
        // Inputs in another order come from anywhere in their row.
        chunk_(order.empty() ? std::min(usual_chunk, map.padded_cols) : map.padded_cols),
        chunks_((map.padded_cols + chunk_ - 1) / chunk_),
        row_words_(formats::dense_words(k_, bits)),
        // A line more than the chunk: the same column of neighbouring rows must not fall into the same cache set.
        stride_(round_up(chunk_, Map::tile_cols) + 64),
        fields_(map, stride_) {}

  void pack(std::span<const uint32_t> canonical, std::span<uint32_t> packed) const {
    for_each_task([&](const Area& area, std::span<uint8_t> codes, std::span<uint8_t> line) {
      std::ranges::fill(codes, uint8_t{0});
      for (int64_t row = area.row; row < std::min(area.row_end, n_); ++row) {
        read(canonical, row, area, line, codes.subspan(static_cast<size_t>((row - area.row) * stride_)));
      }
      for_each_tile(area, [&](int64_t row, int64_t col, size_t offset) {
        fields_.pack(codes.data() + offset, packed.data() + map_.code_bit(row, col, 0).word);
      });
    });
  }

  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    for_each_task([&](const Area& area, std::span<uint8_t> codes, std::span<uint8_t> line) {
      for_each_tile(area, [&](int64_t row, int64_t col, size_t offset) {
        fields_.unpack(packed.data() + map_.code_bit(row, col, 0).word, codes.data() + offset);
      });
      for (int64_t row = area.row; row < std::min(area.row_end, n_); ++row) {
        write(codes.subspan(static_cast<size_t>((row - area.row) * stride_)), row, area, line, canonical);
      }
    });
  }

 private:
  static constexpr int64_t usual_chunk = 512;  ///< whole words of canonical codes
  static constexpr int64_t strip = 128;

  struct Area {
    int64_t row, row_end, col, col_end;  ///< padded; ends cut to the padded size
  };

  template <class Body>
  void for_each_task(const Body& body) const {
    const int64_t strips = (map_.padded_rows + strip - 1) / strip;
    parallel_for(strips * chunks_, 2, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> codes(static_cast<size_t>(strip * stride_));
      std::vector<uint8_t> line(order_.size());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / chunks_ * strip;
        const int64_t col = task % chunks_ * chunk_;
        body(Area{row, std::min(row + strip, map_.padded_rows), col, std::min(col + chunk_, map_.padded_cols)},
             std::span(codes), std::span(line));
      }
    });
  }

  /// Calls body(row, col, offset of the tile in the strip's bytes).
  template <class Body>
  void for_each_tile(const Area& area, const Body& body) const {
    for (int64_t col = area.col; col < area.col_end; col += Map::tile_cols) {
      for (int64_t row = area.row; row < area.row_end; row += Map::tile_rows) {
        body(row, col, static_cast<size_t>((row - area.row) * stride_ + col - area.col));
      }
    }
  }

  int64_t columns(const Area& area) const noexcept {
    return std::max<int64_t>(0, std::min(area.col_end, k_) - area.col);
  }

  std::span<const uint32_t> row_of(std::span<const uint32_t> words, int64_t row) const {
    return words.subspan(static_cast<size_t>(row * row_words_), static_cast<size_t>(row_words_));
  }

  void read(std::span<const uint32_t> canonical, int64_t row, const Area& area, std::span<uint8_t> line,
            std::span<uint8_t> out) const {
    const auto words = row_of(canonical, row);
    const auto count = static_cast<size_t>(columns(area));
    if (order_.empty()) {
      const auto part = words.subspan(static_cast<size_t>(area.col * bits / 32));
      return formats::dense_unpack(part.first(static_cast<size_t>(formats::dense_words(columns(area), bits))), bits,
                                   out.first(count));
    }
    formats::dense_unpack(words, bits, line);
    for (size_t i = 0; i < count; ++i) out[i] = line[static_cast<size_t>(order_[i])];
  }

  void write(std::span<const uint8_t> codes, int64_t row, const Area& area, std::span<uint8_t> line,
             std::span<uint32_t> canonical) const {
    const auto words = row_of(canonical, row);
    const std::span<uint32_t> to(canonical.data() + (words.data() - canonical.data()), words.size());
    const auto count = static_cast<size_t>(columns(area));
    if (order_.empty()) {
      const auto part = to.subspan(static_cast<size_t>(area.col * bits / 32));
      return formats::dense_pack(codes.first(count), bits,
                                 part.first(static_cast<size_t>(formats::dense_words(columns(area), bits))));
    }
    for (size_t i = 0; i < count; ++i) line[static_cast<size_t>(order_[i])] = codes[i];
    formats::dense_pack(line, bits, to);
  }

  const Map& map_;
  int64_t n_, k_;
  std::span<const int32_t> order_;
  int64_t chunk_, chunks_, row_words_, stride_;
  TileFields<Map, bits> fields_;
};

}  // namespace detail

template <class Map>
concept MovesWords = requires(const Map& map) {
  map.word(int64_t{}, int64_t{});
};

/// Moves whole words, in small squares. Writes run along lines; the side that is read across them is eight lines wide,
/// which a cache set holds whatever their distance.
template <MovesWords Map>
class WordMover {
 public:
  WordMover(const Map& map, const formats::PackedWeight& shape)
      : map_(map), n_(shape.n), row_words_(formats::dense_words(shape.k, shape.scheme.bits)) {}

  void pack(std::span<const uint32_t> canonical, std::span<uint32_t> packed) const {
    for_each_square(8, 16, [&](int64_t row, int64_t row_end, int64_t word, int64_t word_end) {
      for (int64_t w = word; w < word_end; ++w) {
        for (int64_t r = row; r < row_end; ++r) packed[place(r, w)] = canonical[index(r, w)];
      }
    });
  }
  void unpack(std::span<const uint32_t> packed, std::span<uint32_t> canonical) const {
    for_each_square(16, 8, [&](int64_t row, int64_t row_end, int64_t word, int64_t word_end) {
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t w = word; w < word_end; ++w) canonical[index(r, w)] = packed[place(r, w)];
      }
    });
  }

 private:
  size_t index(int64_t row, int64_t word) const noexcept { return static_cast<size_t>(row * row_words_ + word); }
  size_t place(int64_t row, int64_t word) const noexcept { return static_cast<size_t>(map_.word(row, word)); }

  template <class Body>
  void for_each_square(int64_t rows, int64_t words, const Body& body) const {
    constexpr int64_t task_rows = 64, task_words = 64;
    const int64_t strips = (row_words_ + task_words - 1) / task_words;
    parallel_for((n_ + task_rows - 1) / task_rows * strips, 4, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / strips * task_rows, row_end = std::min(row + task_rows, n_);
        const int64_t word = task % strips * task_words, word_end = std::min(word + task_words, row_words_);
        for (int64_t w = word; w < word_end; w += words) {
          for (int64_t r = row; r < row_end; r += rows) {
            body(r, std::min(r + rows, row_end), w, std::min(w + words, word_end));
          }
        }
      }
    });
  }

  const Map& map_;
  int64_t n_, row_words_;
};

/// Calls body with the tile mover of a weight of 4 or 8 bits.
template <class Map, class Body>
void with_tiles(const Map& map, const formats::PackedWeight& weight, const Body& body) {
  const std::vector<int32_t> order = inputs_by_group(weight);
  if (weight.scheme.bits == 4) return body(detail::TileMover<Map, 4>(map, weight, order));
  body(detail::TileMover<Map, 8>(map, weight, order));
}

/// What moves the codes of a map: specialized where a faster way was measured. `with` calls body with an object that
/// has pack(canonical words, words) and unpack(words, canonical words).
template <class Map>
struct CodeMovers {
  template <class Body>
  static void with(const Map& map, const formats::PackedWeight& weight, const Body& body) {
    if constexpr (MovesWords<Map>) {
      body(WordMover<Map>(map, weight));
    } else {
      with_tiles(map, weight, body);
    }
  }
};

}  // namespace w4q::repack
