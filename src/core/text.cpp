#include "core/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "core/terminal.h"

namespace w4q {
namespace {

/// Length of the valid UTF-8 sequence at `text[0]`, 0 when there is none.
size_t utf8_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t length = first < 0x80                    ? 1
                        : first >= 0xC2 && first < 0xE0 ? 2
                        : first >= 0xE0 && first < 0xF0 ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return 0;
  }
  return length;
}

bool looks_numeric(std::string_view cell) {
  return !cell.empty() &&
         (std::isdigit(static_cast<unsigned char>(cell.front())) || cell.front() == '-' || cell.front() == '+');
}

std::string padded(const std::string& cell, size_t width, bool right) {
  const std::string fill(width - std::min(width, display_width(cell)), ' ');
  return right ? fill + cell : cell + fill;
}

}  // namespace

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string result;
  for (const auto& part : parts) {
    if (!result.empty()) result += separator;
    result += part;
  }
  return result;
}

std::string shape_text(const Shape& shape) {
  std::string result = "[";
  for (size_t i = 0; i < shape.size(); ++i) result += (i ? ", " : "") + std::to_string(shape[i]);
  return result + "]";
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string human_bytes(int64_t bytes) {
  constexpr std::array<const char*, 6> units{"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1000 && unit + 1 < units.size()) value /= 1000, ++unit;
  return concat(unit == 0 ? std::to_string(bytes)
                          : fixed(value, value < 10    ? 2
                                         : value < 100 ? 1
                                                       : 0),
                " ", units[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 1) return fixed(seconds * 1000, 0) + " ms";
  if (seconds < 10) return fixed(seconds, 1) + " s";
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  const auto two_digits = [](int64_t value) { return (value < 10 ? "0" : "") + std::to_string(value); };
  if (whole < 60) return concat(whole, " s");
  if (whole < 3600) return concat(whole / 60, " min ", two_digits(whole % 60), " s");
  return concat(whole / 3600, " h ", two_digits(whole % 3600 / 60), " min");
}

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0 || first < 0x20 || first == 0x7F) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\x%02X", first);
      result += escape.data();
      text.remove_prefix(1);
    } else {
      result += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return result;
}

size_t likeness(std::string_view a, std::string_view b) {
  const auto front = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  const auto back = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin();
  return static_cast<size_t>(front + back);
}

std::string TextTable::str() const {
  std::vector<size_t> widths(header_.size());
  std::vector<bool> numeric(header_.size(), !rows_.empty());
  for (size_t column = 0; column < header_.size(); ++column) {
    widths[column] = display_width(header_[column]);
    for (const auto& cells : rows_) {
      widths[column] = std::max(widths[column], display_width(cells[column]));
      if (!cells[column].empty() && cells[column] != "–" && !looks_numeric(cells[column])) numeric[column] = false;
    }
  }
  std::string result;
  const auto emit = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t column = 0; column < cells.size(); ++column) {
      line += (column ? "  " : "") + padded(cells[column], widths[column], numeric[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + "\n";
  };
  emit(header_);
  for (const auto& cells : rows_) emit(cells);
  return result;
}

}  // namespace w4q
