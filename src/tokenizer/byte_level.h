// The byte-level alphabet: every byte has a visible character, so that any text is made of 256 known ones. Bytes that
// are visible in Latin-1 stand for themselves, the other 68 for U+0100 and up, in order.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace w4q::tokenizer {

/// The code point of each byte.
constexpr std::array<uint16_t, 256> byte_level_alphabet() noexcept {
  std::array<uint16_t, 256> result{};
  uint16_t next = 0x100;
  for (uint16_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    result[byte] = visible ? byte : next++;
  }
  return result;
}

/// Appends the characters of the bytes of `text`.
void append_byte_level(std::string_view text, std::string& out);

/// Appends the bytes that the characters of `text` stand for; `text` as it is when one of them stands for none.
void append_bytes_of_level(std::string_view text, std::string& out);

}  // namespace w4q::tokenizer
