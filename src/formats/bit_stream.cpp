#include "formats/bit_stream.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/with_bits.h"

namespace w4q::formats {
namespace {

constexpr size_t group = 8;  ///< codes that take a whole number of bytes, whatever their width

/// Ones in the low `width` bits of every `spacing` bits.
constexpr uint64_t low_fields(int width, int spacing) noexcept {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += spacing) mask |= ((uint64_t{1} << width) - 1) << at;
  return mask;
}

/// Moves every other field of `width` bits, `spacing` apart, next to the one below it: fields twice as wide, twice as
/// far apart.
template <int width, int spacing>
uint64_t join_neighbours(uint64_t fields) noexcept {
  constexpr uint64_t low = low_fields(width, 2 * spacing);
  return (fields & low) | ((fields >> (spacing - width)) & (low << width));
}

template <int width, int spacing>
uint64_t split_neighbours(uint64_t fields) noexcept {
  constexpr uint64_t low = low_fields(width, 2 * spacing);
  return (fields & low) | ((fields & (low << width)) << (spacing - width));
}

/// Eight codes of a byte each into `bits` bytes.
template <int bits>
uint64_t join_codes(const uint8_t* codes) noexcept {
  uint64_t joined;
  std::memcpy(&joined, codes, sizeof joined);
  if constexpr (bits == 8) return joined;
  joined = join_neighbours<bits, 8>(joined);
  joined = join_neighbours<2 * bits, 16>(joined);
  return join_neighbours<4 * bits, 32>(joined);
}

template <int bits>
void split_codes(uint64_t joined, uint8_t* codes) noexcept {
  if constexpr (bits < 8) {
    joined = split_neighbours<4 * bits, 32>(joined);
    joined = split_neighbours<2 * bits, 16>(joined);
    joined = split_neighbours<bits, 8>(joined);
  }
  std::memcpy(codes, &joined, sizeof joined);
}

template <int bits>
void pack(std::span<const uint8_t> codes, std::span<uint32_t> words) noexcept {
  auto* out = reinterpret_cast<unsigned char*>(words.data());
  size_t i = 0;
  for (; i + group <= codes.size(); i += group, out += bits) {
    const uint64_t joined = join_codes<bits>(codes.data() + i);
    std::memcpy(out, &joined, bits);
  }
  const auto left = static_cast<size_t>(reinterpret_cast<unsigned char*>(words.data() + words.size()) - out);
  if (left == 0) return;
  // The tail by way of a whole group of zeros behind it; its bytes and the rest of the last word become zero.
  uint8_t tail[group] = {};
  std::copy(codes.begin() + static_cast<std::ptrdiff_t>(i), codes.end(), tail);
  const uint64_t joined = join_codes<bits>(tail);
  std::memset(out, 0, left);
  std::memcpy(out, &joined, std::min<size_t>(left, bits));
}

template <int bits>
void unpack(std::span<const uint32_t> words, std::span<uint8_t> codes) noexcept {
  const auto* in = reinterpret_cast<const unsigned char*>(words.data());
  size_t i = 0;
  for (; i + group <= codes.size(); i += group, in += bits) {
    uint64_t joined = 0;
    std::memcpy(&joined, in, bits);
    split_codes<bits>(joined, codes.data() + i);
  }
  if (i == codes.size()) return;
  const auto left = static_cast<size_t>(reinterpret_cast<const unsigned char*>(words.data() + words.size()) - in);
  uint64_t joined = 0;
  std::memcpy(&joined, in, std::min<size_t>(left, bits));
  uint8_t tail[group];
  split_codes<bits>(joined, tail);
  std::copy_n(tail, codes.size() - i, codes.begin() + static_cast<std::ptrdiff_t>(i));
}

}  // namespace

void dense_pack(std::span<const uint8_t> codes, int bits, std::span<uint32_t> words) {
  ensure(static_cast<int64_t>(words.size()) == dense_words(static_cast<int64_t>(codes.size()), bits),
         "dense_pack: wrong number of words");
  with_bits<1, 2, 3, 4, 5, 6, 7, 8>(bits, [&]<int width> { pack<width>(codes, words); });
}

void dense_unpack(std::span<const uint32_t> words, int bits, std::span<uint8_t> codes) {
  ensure(static_cast<int64_t>(words.size()) == dense_words(static_cast<int64_t>(codes.size()), bits),
         "dense_unpack: wrong number of words");
  with_bits<1, 2, 3, 4, 5, 6, 7, 8>(bits, [&]<int width> { unpack<width>(words, codes); });
}

uint32_t dense_unused_bits(int64_t count, int bits) noexcept {
  const int64_t used = count * bits % 32;
  return used == 0 ? 0 : ~0u << used;
}

void padded_pack(std::span<const uint8_t> codes, int bits, std::span<uint32_t> words) {
  ensure(bits >= stream_min_bits && bits <= stream_max_bits, "padded_pack: codes are 1 to 8 bits wide");
  ensure(static_cast<int64_t>(words.size()) == padded_words(static_cast<int64_t>(codes.size()), bits),
         "padded_pack: wrong number of words");
  const auto per_word = static_cast<size_t>(32 / bits);
  for (size_t word = 0; word < words.size(); ++word) {
    uint32_t packed = 0;
    const size_t first = word * per_word;
    for (size_t i = 0; i < std::min(per_word, codes.size() - first); ++i) {
      packed |= uint32_t{codes[first + i]} << (i * static_cast<size_t>(bits));
    }
    words[word] = packed;
  }
}

void padded_unpack(std::span<const uint32_t> words, int bits, std::span<uint8_t> codes) {
  ensure(bits >= stream_min_bits && bits <= stream_max_bits, "padded_unpack: codes are 1 to 8 bits wide");
  ensure(static_cast<int64_t>(words.size()) == padded_words(static_cast<int64_t>(codes.size()), bits),
         "padded_unpack: wrong number of words");
  const auto per_word = static_cast<size_t>(32 / bits);
  const uint32_t mask = (1u << bits) - 1;
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>((words[i / per_word] >> (i % per_word * static_cast<size_t>(bits))) & mask);
  }
}

uint32_t padded_unused_bits(int64_t word, int64_t count, int bits) noexcept {
  const int64_t per_word = 32 / bits;
  const int64_t used = std::min(per_word, count - word * per_word) * bits;
  return used >= 32 ? 0 : ~0u << used;
}

}  // namespace w4q::formats
