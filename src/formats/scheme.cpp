#include "formats/scheme.h"

#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

std::string_view to_string(ScaleType type) noexcept { return scale_codec(type).name; }

std::string to_string(const Scheme& scheme) { return scheme_row(scheme.family).print(scheme); }

namespace {

/// "int4-g128-f16, int4-g128-f16-asym …" of "int4": names that go on where `text` ends, the first few of them.
std::vector<std::string> longer_names(std::string_view text) {
  constexpr size_t most = 4;
  std::vector<std::string> names;
  for (const SchemeRow& row : scheme_registry()) {
    for (const Scheme& scheme : row.schemes()) {
      std::string name = to_string(scheme);
      if (names.size() < most && !text.empty() && name.starts_with(concat(text, "-"))) names.push_back(std::move(name));
    }
  }
  return names;
}

}  // namespace

Scheme parse_scheme(std::string_view text) {
  std::vector<std::string> known;
  for (const SchemeRow& row : scheme_registry()) {
    if (const auto scheme = row.parse(text)) return *scheme;
    if (!row.form.empty()) {
      known.emplace_back(row.form);
      continue;
    }
    for (const Scheme& scheme : row.schemes()) known.push_back(to_string(scheme));
  }
  Error error(ErrorCode::unsupported, concat("unknown scheme \"", printable(text.substr(0, 64)), "\""));
  error.detail("known: " + join(known));
  if (const auto longer = longer_names(text); !longer.empty()) error.hint("for example " + join(longer));
  throw error;
}

bool exists(const Scheme& scheme) {
  const SchemeRow& row = scheme_row(scheme.family);
  return row.parse(row.print(scheme)) == scheme;
}

std::string to_string(std::span<const Scheme> passes) {
  std::vector<std::string> names;
  for (const Scheme& scheme : passes) names.push_back(to_string(scheme));
  return join(names, "+");
}

std::vector<Scheme> parse_schemes(std::string_view text) {
  std::vector<Scheme> passes;
  while (true) {
    const size_t plus = text.find('+');
    passes.push_back(parse_scheme(text.substr(0, plus)));
    if (plus == std::string_view::npos) return passes;
    if (passes.size() == max_passes) {
      throw Error(ErrorCode::unsupported, concat("more than ", max_passes, " passes"));
    }
    text.remove_prefix(plus + 1);
  }
}

}  // namespace w4q::formats
