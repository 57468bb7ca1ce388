// Classes of characters that the tokenizer asks for outside regular expressions.
#pragma once

#include <array>
#include <string_view>

#include "text/utf8.h"

namespace w4q::tokenizer {

/// The Unicode property White_Space.
constexpr bool is_white_space(char32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/// Bytes of white space at the start of valid UTF-8.
inline size_t leading_white_space(std::string_view text) noexcept {
  size_t at = 0;
  while (at < text.size()) {
    const text::Utf8Step step = text::utf8_step(text.substr(at));
    if (!is_white_space(step.code_point)) break;
    at += step.size;
  }
  return at;
}

/// Where the last character of valid UTF-8, not empty, begins.
inline size_t last_character(std::string_view text) noexcept {
  size_t at = text.size() - 1;
  while (at > 0 && text::utf8_continues(text[at])) --at;
  return at;
}

/// Where the white space at the end of valid UTF-8 begins.
inline size_t trailing_white_space(std::string_view text) noexcept {
  size_t end = text.size();
  while (end > 0) {
    const size_t last = last_character(text.substr(0, end));
    if (!is_white_space(text::utf8_step(text.substr(last, end - last)).code_point)) break;
    end = last;
  }
  return end;
}

}  // namespace w4q::tokenizer
