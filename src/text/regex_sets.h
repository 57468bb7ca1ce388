// Sets of characters: what Oniguruma calls by a name, and how PCRE2 writes them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::text {

/// The "body" of a set is what stands between the brackets of a PCRE2 class.
namespace regex_sets {
inline constexpr std::string_view word = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
/// Outside a class, \w and \b count the superscript digits and fractions of Latin-1 as well.
inline constexpr std::string_view lone_word = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\xB2\xB3\xB9\xBC-\xBE)";
inline constexpr std::string_view digit = R"(\p{Nd})";
inline constexpr std::string_view space = R"(\p{White_Space})";
inline constexpr std::string_view hex = "0-9A-Fa-f";
}  // namespace regex_sets

/// The body of [:name:]; nothing for an unknown name.
std::optional<std::string_view> posix_body(std::string_view name);
/// The body of \p{name}. A name that PCRE2 does not know either is found out when the pattern is compiled.
std::string property_body(std::string_view name);
/// "[body]" or "[^body]".
std::string class_of(std::string_view body, bool negated);

/// The union of what stands in a class: PCRE2 can say `plain` in brackets; each of `others` is an expression that
/// matches one character.
struct ClassUnion {
  std::string plain;
  std::vector<std::string> others;
  bool after_set = false;  ///< a hyphen that follows is no range

  void add(std::string_view body, bool negated) {
    if (negated) {
      add_other(class_of(body, true));
    } else {
      plain += body;
      after_set = true;
    }
  }
  void add_other(std::string expression) {
    others.push_back(std::move(expression));
    after_set = true;
  }
  void add_character(std::string_view text) {
    if (after_set && text == "-") plain += '\\';
    plain += text;
    after_set = false;
  }

  /// An expression that matches one character in the union, or one that is not in it.
  std::string text(bool negated) const;
};

}  // namespace w4q::text
