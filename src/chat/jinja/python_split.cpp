// The methods of Python's str that cut and replace.
#include <algorithm>

#include "chat/jinja/failure.h"
#include "chat/jinja/python_text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

/// A piece of a text in bytes.
struct Piece {
  size_t begin, end;
};

/// The runs without white space.
std::vector<Piece> words(std::string_view text) {
  std::vector<Piece> result;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const auto step = text::utf8_step(text.substr(at));
    const bool space = is_space(step.code_point);
    if (!space && !inside) result.push_back({at, at});
    at += step.size;
    if (!space) result.back().end = at;
    inside = !space;
  }
  return result;
}

/// All words, but what lies beyond `most` cuts stays one piece, with the white space at its far end.
std::vector<std::string> split_at_spaces(std::string_view text, int64_t most, bool from_right) {
  std::vector<Piece> found = words(text);
  const size_t words_left =
      most < 0 || static_cast<size_t>(most) >= found.size() ? 0 : found.size() - static_cast<size_t>(most);
  if (words_left > 0 && from_right) {
    found.erase(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(words_left) - 1);
    found.front().begin = 0;
  } else if (words_left > 0) {
    found.resize(static_cast<size_t>(most) + 1);
    found.back().end = text.size();
  }
  std::vector<std::string> result;
  for (const Piece& piece : found) result.emplace_back(text.substr(piece.begin, piece.end - piece.begin));
  return result;
}

/// Bytes of the line end at `at`, 0: there is none.
size_t line_end(std::string_view text, size_t at) {
  if (text.substr(at, 2) == "\r\n") return 2;
  const auto step = text::utf8_step(text.substr(at));
  const char32_t c = step.code_point;
  const bool ends = (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
  return ends ? step.size : 0;
}

}  // namespace

std::vector<std::string> split(std::string_view text, const std::optional<std::string>& separator, int64_t most,
                               bool from_right) {
  if (!separator) return split_at_spaces(text, most, from_right);
  std::vector<std::string> result;
  const auto left = [&] { return most < 0 || static_cast<int64_t>(result.size()) < most; };
  if (from_right) {
    size_t end = text.size();
    while (left()) {
      const size_t at =
          end < separator->size() ? std::string_view::npos : text.rfind(*separator, end - separator->size());
      if (at == std::string_view::npos) break;
      result.emplace_back(text.substr(at + separator->size(), end - at - separator->size()));
      end = at;
    }
    result.emplace_back(text.substr(0, end));
    std::ranges::reverse(result);
    return result;
  }
  size_t begin = 0;
  while (left()) {
    const size_t at = text.find(*separator, begin);
    if (at == std::string_view::npos) break;
    result.emplace_back(text.substr(begin, at - begin));
    begin = at + separator->size();
  }
  result.emplace_back(text.substr(begin));
  return result;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> result;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = line_end(text, at);
    if (end == 0) {
      at += text::utf8_step(text.substr(at)).size;
      continue;
    }
    result.emplace_back(text.substr(begin, at - begin + (keep_ends ? end : 0)));
    begin = at += end;
  }
  if (begin < text.size()) result.emplace_back(text.substr(begin));
  return result;
}

std::string replace(std::string_view text, std::string_view old, std::string_view with, int64_t count,
                    size_t max_bytes) {
  std::string result;
  const auto add = [&](std::string_view part) {
    if (result.size() + part.size() > max_bytes) {
      throw Failure(ErrorCode::unsupported, "replacing makes a text too long")
          .remedy("the template looks damaged or malicious");
    }
    result += part;
  };
  size_t at = 0;
  for (; count != 0; --count) {
    const size_t found = text.find(old, at);
    if (found == std::string_view::npos) break;
    add(text.substr(at, found - at));
    add(with);
    at = found + old.size();
    if (!old.empty()) continue;
    if (at == text.size()) return result;
    const size_t step = text::utf8_size(text[at]);  // between any two characters
    add(text.substr(at, step));
    at += step;
  }
  add(text.substr(std::min(at, text.size())));
  return result;
}

}  // namespace w4q::jinja
