// Python's str on UTF-8: characters are code points.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::jinja {

/// Code points of valid UTF-8, and back.
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view text);
/// Number of code points.
int64_t length_of(std::string_view text) noexcept;

/// str.isspace() of a character.
bool is_space(char32_t character) noexcept;
/// Whether repr() shows the character itself.
bool is_printable(char32_t character) noexcept;
bool is_alpha(char32_t character) noexcept;
bool is_digit(char32_t character) noexcept;
/// Letters that have case: Lu and Lt, Ll.
bool is_upper(char32_t character) noexcept;
bool is_lower(char32_t character) noexcept;

/// Which sides strip() works on.
struct Sides {
  bool left = true, right = true;
};
/// str.strip, lstrip, rstrip. `characters`: nothing for white space.
std::string strip(std::string_view text, const std::optional<std::string>& characters, Sides sides);
/// One code point becomes one other, but for ß, whose upper case is SS.
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string title(std::string_view text);
std::string capitalize(std::string_view text);
/// Whether all letters with case are lower (upper) case, and there is one.
bool all_lower(std::string_view text);
bool all_upper(std::string_view text);

/// str.replace; a negative `count` means all.
std::string replace(std::string_view text, std::string_view old, std::string_view with, int64_t count,
                    size_t max_bytes);
/// str.split and rsplit: nothing for `separator` means runs of white space; a negative `most` means all. An empty
/// separator must have been refused.
std::vector<std::string> split(std::string_view text, const std::optional<std::string>& separator, int64_t most,
                               bool from_right);
/// str.splitlines() for the line ends that text has: \n, \r, \r\n and those of Unicode.
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);

/// int(text) and float(text): nothing where Python throws ValueError.
std::optional<int64_t> parse_integer(std::string_view text, int base);
std::optional<double> parse_float(std::string_view text);

}  // namespace w4q::jinja
