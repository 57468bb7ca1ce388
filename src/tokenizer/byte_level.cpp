#include "tokenizer/byte_level.h"

#include "text/utf8.h"

namespace w4q::tokenizer {
namespace {

constexpr auto alphabet = byte_level_alphabet();

/// The byte of each code point, -1 for none. The last character in use is U+0143.
constexpr auto bytes_of = [] {
  std::array<int16_t, 0x144> result{};
  result.fill(-1);
  for (size_t byte = 0; byte < alphabet.size(); ++byte) result[alphabet[byte]] = static_cast<int16_t>(byte);
  return result;
}();

}  // namespace

void append_byte_level(std::string_view text, std::string& out) {
  for (const char c : text) text::utf8_append(out, alphabet[static_cast<unsigned char>(c)]);
}

void append_bytes_of_level(std::string_view text, std::string& out) {
  const size_t before = out.size();
  for (std::string_view rest = text; !rest.empty();) {
    const text::Utf8Step step = text::utf8_step(rest);
    const int byte = step.valid && step.code_point < bytes_of.size() ? bytes_of[step.code_point] : -1;
    if (byte < 0) {
      out.resize(before);
      out += text;
      return;
    }
    out += static_cast<char>(byte);
    rest.remove_prefix(step.size);
  }
}

}  // namespace w4q::tokenizer
