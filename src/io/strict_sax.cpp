#include "io/strict_sax.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace w4q::io {
namespace {

/// Length of the well-formed UTF-8 sequence at `text[0]` (no overlong forms, no surrogates), 0 when there is none.
size_t sequence_length(std::string_view text) noexcept {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto between = [&](size_t i, uint8_t low, uint8_t high) { return byte(i) >= low && byte(i) <= high; };
  const auto follows = [&](size_t i) { return between(i, 0x80, 0xBF); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (between(0, 0xC2, 0xDF)) return follows(1) ? 2 : 0;
  if (between(0, 0xE0, 0xEF)) {
    const bool second = first == 0xE0 ? between(1, 0xA0, 0xBF) : first == 0xED ? between(1, 0x80, 0x9F) : follows(1);
    return second && follows(2) ? 3 : 0;
  }
  if (between(0, 0xF0, 0xF4)) {
    const bool second = first == 0xF0 ? between(1, 0x90, 0xBF) : first == 0xF4 ? between(1, 0x80, 0x8F) : follows(1);
    return second && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

/// The parser's message without its own prefix and place, which error_at() writes in the project's form.
std::string_view reason(std::string_view message) {
  const auto after = [&](std::string_view mark) {
    const size_t at = message.find(mark);
    if (at != std::string_view::npos) message.remove_prefix(at + mark.size());
  };
  after("] ");
  if (message.starts_with("parse error at ")) after(": ");
  return message;
}

Error text_error(std::string_view text, std::string_view source, std::string_view problem, size_t offset) {
  return Error(ErrorCode::bad_file, concat(shown(source), ": ", problem)).detail("at " + line_and_column(text, offset));
}

}  // namespace

size_t invalid_utf8_offset(std::string_view text) noexcept {
  for (size_t at = 0; at < text.size();) {
    const size_t length = sequence_length(text.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string line_and_column(std::string_view text, size_t offset) {
  const auto before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_start = before.find_last_of('\n') + 1;  // npos + 1 is 0
  return concat("line ", line, ", column ", before.size() - line_start + 1);
}

void check_json_text(std::string_view text, std::string_view source) {
  if (text.starts_with("\xEF\xBB\xBF")) {
    throw Error(ErrorCode::bad_file,
                concat(shown(source), ": starts with a byte order mark, which JSON does not allow"))
        .hint("save the file as UTF-8 without BOM");
  }
  const size_t nul = text.find('\0');
  if (nul != std::string_view::npos) throw text_error(text, source, "holds a NUL byte", nul);
  const size_t invalid = invalid_utf8_offset(text);
  if (invalid != std::string_view::npos) throw text_error(text, source, "is not valid UTF-8", invalid);
}

void StrictSax::open() {
  if (levels_.size() == max_json_depth) throw error(concat("is nested deeper than ", max_json_depth, " levels"));
  levels_.push_back(keys_.size());
}

std::vector<std::string> StrictSax::close_object() {
  const auto first = keys_.begin() + static_cast<std::ptrdiff_t>(levels_.back());
  levels_.pop_back();
  // Sorting needs no luck with hash values, which a hostile file could choose to collide.
  std::vector<const Key*> sorted;
  for (auto key = first; key != keys_.end(); ++key) sorted.push_back(&*key);
  std::sort(sorted.begin(), sorted.end(),
            [](const Key* a, const Key* b) { return std::tie(a->text, a->offset) < std::tie(b->text, b->offset); });
  const auto twin =
      std::adjacent_find(sorted.begin(), sorted.end(), [](const Key* a, const Key* b) { return a->text == b->text; });
  if (twin != sorted.end()) {
    const Key& second = **(twin + 1);
    throw error_at(concat("the key \"", shown(second.text), "\" appears twice in one object"), second.offset);
  }
  std::vector<std::string> result;
  for (auto key = first; key != keys_.end(); ++key) result.push_back(std::move(key->text));
  keys_.erase(first, keys_.end());
  return result;
}

bool StrictSax::parse_error(size_t position, const std::string& /*last_token*/,
                            const nlohmann::detail::exception& exception) {
  throw error_at(concat("is not valid JSON: ", shown(reason(exception.what()))), position == 0 ? 0 : position - 1);
}

Error StrictSax::error_at(std::string_view problem, size_t offset) const {
  return text_error(text_, source_, problem, offset);
}

}  // namespace w4q::io
