// Recipes in JSON files.
#pragma once

#include <filesystem>

#include "io/json.h"
#include "quantize/recipe.h"

namespace w4q::pipeline {

/// Reads {"steps": "lloyd+search → feedback", "rules": [{"match": "*.mlp.*", "scheme": "kbit3-b32-e4m4"}, {"match":
/// "*", "scheme": "keep"}]}. Throws bad_file naming the rule by its number. Steps may be left out.
quantize::Recipe parse_recipe(const io::Json& json, std::string_view source);
quantize::Recipe read_recipe(const std::filesystem::path& path);
/// The passes of one scheme for everything, and steps: "kbit3: awq → rotate128 → lloyd+search → feedback".
struct RecipeLine {
  std::vector<formats::Scheme> passes;
  quantize::Steps steps;
};
/// True for a text that has the form of such a line rather than that of a file name.
bool is_recipe_line(std::string_view text) noexcept;
/// Before the colon stands a scheme's whole name, or kbit2 … kbit5 (E4M4 scales), int2 … int8 (groups of 128, f16,
/// asymmetric), rotated2 … rotated5 (groups of 128, f16); "+" joins passes. Throws as parse_scheme and parse_steps do.
RecipeLine parse_recipe_line(std::string_view text);
/// What read_recipe reads.
io::Json to_json(const quantize::Recipe& recipe);

}  // namespace w4q::pipeline
