#include "formats/scheme.h"

#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

std::string_view to_string(ScaleType type) noexcept { return type == ScaleType::e4m4 ? "e4m4" : "f16"; }

std::string to_string(const Scheme& scheme) {
  return concat(scheme_row(scheme.family).name, scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

Scheme parse_scheme(std::string_view text) {
  std::vector<std::string> names;
  for (const SchemeRow& row : scheme_registry()) {
    for (const Scheme& scheme : row.schemes()) {
      names.push_back(to_string(scheme));
      if (names.back() == text) return scheme;
    }
  }
  throw Error(ErrorCode::unsupported, concat("unknown scheme \"", printable(text.substr(0, 64)), "\""))
      .detail("known: " + join(names));
}

}  // namespace w4q::formats
