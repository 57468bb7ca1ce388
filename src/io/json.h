// JSON from hostile files: duplicate keys, depth and size are limited, and messages name the place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

namespace w4q::io {

/// Keeps the order of keys, so that a rewritten config.json differs only where it was changed.
using Json = nlohmann::ordered_json;

/// Parses `text`; `source` names it in messages. Throws bad_file on a syntax error (with line and column), a duplicate
/// key, invalid UTF-8 or nesting deeper than 100.
Json parse_json(std::string_view text, std::string_view source);
/// A config: of the largest models, with each of 50,000 linears named, they have some ten megabytes.
inline constexpr int64_t max_config_bytes = 16'000'000;
/// A tokenizer.json, of which the largest seen has 35 megabytes.
inline constexpr int64_t max_tokenizer_bytes = 64'000'000;

/// read_model_file and parse_json.
Json read_json(const std::filesystem::path& path, int64_t max_bytes = max_config_bytes);

}  // namespace w4q::io
