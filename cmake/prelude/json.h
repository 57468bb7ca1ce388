// JSON without its literal: "…"_json is an inline function, for which every object instantiates a parser that nobody asks
// for (GCC 12: 0.4 s each). Here it is deleted, and its body becomes that of a template. Where a library writes it in another
// way this changes nothing.
#pragma once
#pragma GCC system_header

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name is the library's
#define _json(text, size)     \
  _json(text, size) = delete; \
  template <int>              \
  nlohmann::json parse_literal(text, size)
#include <nlohmann/json.hpp>
#undef _json
