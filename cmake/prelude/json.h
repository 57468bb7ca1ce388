// JSON without its literals: "…"_json and "…"_json_pointer are inline functions, for which every object instantiates a parser
// that nobody asks for (GCC 12: 0.4 and 0.1 s each). Here they are deleted, and their bodies become those of templates. Where
// a library writes them in another way this changes nothing.
#pragma once
#pragma GCC system_header

// NOLINTBEGIN(bugprone-reserved-identifier): the names are the library's
#define _json(text, size)     \
  _json(text, size) = delete; \
  template <int>              \
  nlohmann::json parse_literal(text, size)
#define _json_pointer(text, size)     \
  _json_pointer(text, size) = delete; \
  template <int>                      \
  nlohmann::json::json_pointer parse_pointer_literal(text, size)
// NOLINTEND(bugprone-reserved-identifier)
#include <nlohmann/json.hpp>
#undef _json
#undef _json_pointer
