// Recipes in JSON files.
#pragma once

#include <filesystem>

#include "io/json.h"
#include "quantize/recipe.h"

namespace w4q::pipeline {

/// Reads {"rules": [{"match": "*.mlp.*", "scheme": "kbit3-b32-e4m4"}, {"match": "*", "scheme": "keep"}]}. Throws
/// bad_file naming the rule by its number.
quantize::Recipe parse_recipe(const io::Json& json, std::string_view source);
quantize::Recipe read_recipe(const std::filesystem::path& path);
/// What read_recipe reads.
io::Json to_json(const quantize::Recipe& recipe);

}  // namespace w4q::pipeline
