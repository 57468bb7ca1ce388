// JSON from hostile files: duplicate keys, depth and size are limited, and messages name the place.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

namespace w4q::io {

/// Keeps the order of keys, so that a rewritten config.json differs only where it was changed.
using Json = nlohmann::ordered_json;

/// Parses `text`; `source` names it in messages. Throws bad_file on a syntax error (with line and column), a duplicate
/// key, invalid UTF-8 or nesting deeper than 100.
Json parse_json(std::string_view text, std::string_view source);
/// read_file and parse_json.
Json read_json(const std::filesystem::path& path);

}  // namespace w4q::io
