#include "text/utf8.h"

#include <cstring>

namespace w4q::text {
namespace {

/// What the first byte of a character promises: its size, its own bits, and the bounds of the second byte, which alone
/// keep out overlong forms, surrogates and values above U+10FFFF.
struct Lead {
  uint32_t size;
  uint32_t bits;
  unsigned char low, high;
};

Lead lead_of(unsigned char byte) noexcept {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, byte & 0x1FU, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0xD, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, byte & 0x0FU, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, byte & 0x07U, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 4, 0x80, 0x8F};
  return {1, 0, 0, 0};
}

}  // namespace

Utf8Step utf8_step(std::string_view text) noexcept {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return {first, 1, true};
  const Lead lead = lead_of(first);
  uint32_t code_point = lead.bits;
  for (uint32_t i = 1; i < lead.size; ++i) {
    const auto byte = i < text.size() ? static_cast<unsigned char>(text[i]) : '\0';
    const bool fits = i == 1 ? byte >= lead.low && byte <= lead.high : (byte & 0xC0) == 0x80;
    if (!fits) return {0, i, false};
    code_point = code_point << 6 | (byte & 0x3FU);
  }
  return {code_point, lead.size, lead.size > 1};
}

size_t utf8_valid_prefix(std::string_view text) noexcept {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight = 0;
    if (text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & 0x8080808080808080U) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const Utf8Step step = utf8_step(text.substr(at));
    if (!step.valid) return at;
    at += step.size;
  }
  return at;
}

std::string utf8_repaired(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t valid = utf8_valid_prefix(text);
    result.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    result.append(replacement_character);
    text.remove_prefix(utf8_step(text).size);
  }
  return result;
}

void utf8_append(std::string& text, char32_t code_point) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | ((code_point >> shift) & 0x3F)); };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xC0 | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xE0 | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0 | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace w4q::text
