#include "formats/scheme.h"

#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

std::string_view to_string(ScaleType type) noexcept { return scale_codec(type).name; }

std::string to_string(const Scheme& scheme) { return scheme_row(scheme.family).print(scheme); }

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
  throw Error(ErrorCode::unsupported, concat("unknown scheme \"", printable(text.substr(0, 64)), "\""))
      .detail("known: " + join(known));
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
