// Small text helpers for messages and tables.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/views.h"

namespace w4q {

/// All arguments streamed into one string.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

/// "a, b, c".
std::string join(const std::vector<std::string>& parts, std::string_view separator = ", ");
/// "[4096, 128, 3]".
std::string shape_text(const Shape& shape);
/// `value` with `digits` behind the point.
std::string fixed(double value, int digits);
/// "1.23 GB": decimal units, as disks and model pages count.
std::string human_bytes(int64_t bytes);
/// "850 ms", "12 s", "3 min 05 s", "2 h 07 min".
std::string human_seconds(double seconds);
/// `text` with everything that a terminal could act on (control characters, invalid UTF-8) shown as \xNN: for names
/// that come from a file.
std::string printable(std::string_view text);

/// How alike two names are: the characters that they share at the front and at the back.
size_t likeness(std::string_view a, std::string_view b);

/// A table printed with aligned columns; numbers to the right, words to the left.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : header_(std::move(header)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string str() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace w4q
