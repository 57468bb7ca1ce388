#include "chat/jinja/python_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "chat/jinja/failure.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

char32_t mapped(char32_t character, utf8proc_int32_t (*map)(utf8proc_int32_t)) noexcept {
  return static_cast<char32_t>(map(static_cast<utf8proc_int32_t>(character)));
}

void append_upper(std::string& result, char32_t character) {
  if (character == U'\u00DF') {
    result += "SS";
  } else {
    text::utf8_append(result, mapped(character, utf8proc_toupper));
  }
}

void append_title(std::string& result, char32_t character) {
  if (character == U'\u00DF') {
    result += "Ss";
  } else {
    text::utf8_append(result, mapped(character, utf8proc_totitle));
  }
}

utf8proc_category_t category(char32_t character) noexcept {
  return utf8proc_category(static_cast<utf8proc_int32_t>(character));
}

}  // namespace

std::u32string code_points(std::string_view text) {
  std::u32string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const auto step = text::utf8_step(text);
    result.push_back(step.valid ? step.code_point : U'\uFFFD');
    text.remove_prefix(step.size);
  }
  return result;
}

std::string utf8(std::u32string_view text) {
  std::string result;
  for (const char32_t character : text) text::utf8_append(result, character);
  return result;
}

int64_t length_of(std::string_view text) noexcept {
  return std::ranges::count_if(text, [](char byte) { return !text::utf8_continues(byte); });
}

bool is_space(char32_t c) noexcept {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_printable(char32_t character) noexcept {
  if (character < 0x7F) return character >= 0x20;
  switch (category(character)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

bool is_alpha(char32_t character) noexcept {
  const auto found = category(character);
  return found >= UTF8PROC_CATEGORY_LU && found <= UTF8PROC_CATEGORY_LO;
}
bool is_digit(char32_t character) noexcept { return category(character) == UTF8PROC_CATEGORY_ND; }
bool is_upper(char32_t character) noexcept {
  return category(character) == UTF8PROC_CATEGORY_LU || category(character) == UTF8PROC_CATEGORY_LT;
}
bool is_lower(char32_t character) noexcept { return category(character) == UTF8PROC_CATEGORY_LL; }

std::string strip(std::string_view text, const std::optional<std::string>& characters, Sides sides) {
  const std::u32string all = code_points(text);
  const std::u32string set = characters ? code_points(*characters) : std::u32string();
  const auto goes = [&](char32_t c) { return characters ? set.find(c) != std::u32string::npos : is_space(c); };
  size_t begin = 0, end = all.size();
  while (sides.left && begin < end && goes(all[begin])) ++begin;
  while (sides.right && begin < end && goes(all[end - 1])) --end;
  return utf8(std::u32string_view(all).substr(begin, end - begin));
}

std::string upper(std::string_view text) {
  std::string result;
  for (const char32_t character : code_points(text)) append_upper(result, character);
  return result;
}

std::string lower(std::string_view text) {
  std::string result;
  for (const char32_t character : code_points(text)) text::utf8_append(result, mapped(character, utf8proc_tolower));
  return result;
}

std::string title(std::string_view text) {
  std::string result;
  bool inside = false;  // a word, whose first letter has been seen
  for (const char32_t character : code_points(text)) {
    if (inside) {
      text::utf8_append(result, mapped(character, utf8proc_tolower));
    } else {
      append_title(result, character);
    }
    inside = is_upper(character) || is_lower(character);
  }
  return result;
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return {};
  const size_t first = text::utf8_step(text).size;
  std::string result;
  append_title(result, code_points(text.substr(0, first)).front());
  return result + lower(text.substr(first));
}

bool all_lower(std::string_view text) {
  const auto all = code_points(text);
  return std::ranges::any_of(all, is_lower) && std::ranges::none_of(all, is_upper);
}

bool all_upper(std::string_view text) {
  const auto all = code_points(text);
  return std::ranges::any_of(all, is_upper) && std::ranges::none_of(all, is_lower);
}

std::optional<int64_t> parse_integer(std::string_view text, int base) {
  std::string digits = strip(text, std::nullopt, {});
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  const auto separated = [&](size_t at) { return at > 0 && at + 1 < digits.size() && digits[at - 1] != '_'; };
  for (size_t i = 0; i < digits.size(); ++i) {
    if (digits[i] == '_' && !separated(i)) return std::nullopt;
  }
  std::erase(digits, '_');
  const std::string_view prefix = base == 16 ? "0x" : base == 8 ? "0o" : base == 2 ? "0b" : "";
  if (!prefix.empty() && lower(digits).starts_with(prefix)) digits.erase(0, 2);
  if (digits.empty() || digits.front() == '-') return std::nullopt;
  const std::string signed_digits = (negative ? "-" : "") + digits;
  int64_t result = 0;
  const char* const end = signed_digits.data() + signed_digits.size();
  const auto [stop, error] = std::from_chars(signed_digits.data(), end, result, base);
  if (stop != end || error == std::errc::invalid_argument) return std::nullopt;
  if (error == std::errc{}) return result;
  throw Failure(ErrorCode::unsupported, "the integer '" + signed_digits.substr(0, 40) + "' does not fit 64 bits")
      .remedy("keep it as a string");
}

std::optional<double> parse_float(std::string_view text) {
  std::string digits = lower(strip(text, std::nullopt, {}));
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.erase(0, 1);
  if (digits.empty() || digits.front() == '-' || digits.find('(') != std::string::npos) return std::nullopt;
  double result = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, result);
  if (stop != end || error == std::errc::invalid_argument) return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    result = digits.find("e-") != std::string::npos ? 0.0 : std::numeric_limits<double>::infinity();
  }
  return negative ? -result : result;
}

}  // namespace w4q::jinja
