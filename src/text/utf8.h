// UTF-8: the steps that the tokenizer needs, with the error handling of the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace w4q::text {

/// The character U+FFFD, which stands for every maximal ill-formed part of a text.
inline constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

/// One step through UTF-8: `size` bytes (at least 1) that are a character, or an ill-formed part when not `valid`.
struct Utf8Step {
  char32_t code_point = 0;
  uint32_t size = 1;
  bool valid = false;
};

/// Looks at the start of `text`, which is not empty. An ill-formed part is maximal in the sense of the Unicode Standard
/// (chapter 3, "U+FFFD substitution of maximal subparts").
Utf8Step utf8_step(std::string_view text) noexcept;

/// Number of bytes of valid UTF-8 at the start of `text`.
size_t utf8_valid_prefix(std::string_view text) noexcept;

/// `text` with every maximal ill-formed part replaced by U+FFFD.
std::string utf8_repaired(std::string_view text);

/// Appends a code point that is not a surrogate and not above U+10FFFF.
void utf8_append(std::string& text, char32_t code_point);

/// Bytes of the character that `first` begins; `first` begins a character of valid UTF-8.
inline size_t utf8_size(char first) noexcept {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// Whether `byte` is the second, third or fourth byte of a character.
inline bool utf8_continues(char byte) noexcept { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace w4q::text
