#include "text/regex_sets.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "core/text.h"

namespace w4q::text {
namespace {

struct NamedSet {
  std::string_view name;
  std::string_view body;  ///< what stands between the brackets of a PCRE2 class
};

constexpr std::array<NamedSet, 11> posix_sets{{
    {"alnum", R"(\p{Alphabetic}\p{Nd})"},
    {"alpha", R"(\p{Alphabetic})"},
    {"blank", R"(\p{Zs}\t)"},
    {"cntrl", R"(\p{Cc})"},
    {"digit", regex_sets::digit},
    {"lower", R"(\p{Lowercase})"},
    {"punct", R"(\p{P}\p{S})"},
    {"space", regex_sets::space},
    {"upper", R"(\p{Uppercase})"},
    {"word", regex_sets::word},
    {"xdigit", regex_sets::hex},
}};
constexpr std::array<NamedSet, 7> long_categories{{
    {"letter", R"(\p{L})"},
    {"mark", R"(\p{M})"},
    {"number", R"(\p{N})"},
    {"other", R"(\p{C})"},
    {"punctuation", R"(\p{P})"},
    {"separator", R"(\p{Z})"},
    {"symbol", R"(\p{S})"},
}};

template <size_t count>
std::optional<std::string_view> find_set(const std::array<NamedSet, count>& sets, std::string_view name) {
  const auto row = std::find_if(sets.begin(), sets.end(), [&](const NamedSet& set) { return set.name == name; });
  return row == sets.end() ? std::nullopt : std::optional(row->body);
}

bool compiles(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

}  // namespace

std::optional<std::string_view> posix_body(std::string_view name) { return find_set(posix_sets, name); }

std::string property_body(std::string_view name) {
  std::string plain;
  for (char c : name) {
    if (c != ' ' && c != '_' && c != '-') plain += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (plain == "punct") return R"(\p{P})";
  if (const auto set = find_set(long_categories, plain)) return std::string(*set);
  if (const auto set = find_set(posix_sets, plain)) return std::string(*set);
  // PCRE2's \p{Han} would take in the script's extensions.
  const std::string script = concat("\\p{sc:", name, "}");
  return compiles(script) ? script : concat("\\p{", name, "}");
}

std::string class_of(std::string_view body, bool negated) { return concat(negated ? "[^" : "[", body, "]"); }

std::string ClassUnion::text(bool negated) const {
  if (others.empty()) {
    if (plain.empty()) return negated ? "(?s:.)" : "(?!)";
    return class_of(plain, negated);
  }
  const std::string either = concat(plain.empty() ? "" : class_of(plain, false) + "|", join(others, "|"));
  return negated ? concat("(?:(?!", either, ")(?s:.))") : concat("(?:", either, ")");
}

}  // namespace w4q::text
