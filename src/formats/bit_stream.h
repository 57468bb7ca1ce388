// The two ways in which everybody packs short codes into 32-bit words, little end first.
//
// Dense stream: code i occupies the stream's bits [i·bits, (i+1)·bits), stream bit t is bit t mod 32 of word t div 32;
// codes may straddle words. Padded stream: 32 div bits codes to a word, none straddles, the top bits of every word are
// zero. For 1, 2, 4 and 8 bits the two are the same.
#pragma once

#include <cstdint>
#include <span>

#include "core/host_device.h"

namespace w4q::formats {

inline constexpr int stream_min_bits = 1;
inline constexpr int stream_max_bits = 8;

/// Words of a dense stream of `count` codes.
W4Q_HOST_DEVICE constexpr int64_t dense_words(int64_t count, int bits) noexcept { return (count * bits + 31) / 32; }
/// Words of a padded stream of `count` codes.
W4Q_HOST_DEVICE constexpr int64_t padded_words(int64_t count, int bits) noexcept {
  const int64_t per_word = 32 / bits;
  return (count + per_word - 1) / per_word;
}

/// Code `index` of a dense stream.
inline uint8_t dense_get(std::span<const uint32_t> words, int64_t index, int bits) noexcept {
  const int64_t first = index * bits;
  const auto word = static_cast<size_t>(first / 32);
  const int shift = static_cast<int>(first % 32);
  uint64_t pair = words[word];
  if (shift + bits > 32) pair |= uint64_t{words[word + 1]} << 32;
  return static_cast<uint8_t>((pair >> shift) & ((1u << bits) - 1));
}

/// Packs `codes` (each below 2^bits) into exactly dense_words(codes.size(), bits) words; unused top bits are zero.
/// Throws internal when the sizes do not fit or bits is not in 1 … 8.
void dense_pack(std::span<const uint8_t> codes, int bits, std::span<uint32_t> words);
/// The inverse. Unused top bits are not looked at.
void dense_unpack(std::span<const uint32_t> words, int bits, std::span<uint8_t> codes);
/// The bits of a dense stream's last word that belong to no code.
uint32_t dense_unused_bits(int64_t count, int bits) noexcept;

/// The same for padded streams.
void padded_pack(std::span<const uint8_t> codes, int bits, std::span<uint32_t> words);
void padded_unpack(std::span<const uint32_t> words, int bits, std::span<uint8_t> codes);
/// The bits of word `word` that belong to no code of a padded stream of `count` codes.
uint32_t padded_unused_bits(int64_t word, int64_t count, int bits) noexcept;

}  // namespace w4q::formats
