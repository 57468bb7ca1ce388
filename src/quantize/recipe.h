// Which tensor gets which scheme: ordered glob → scheme rules, the first match wins, no match keeps 16 bit.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"

namespace w4q::quantize {

struct RecipeRule {
  std::string glob;                       ///< against the module path ("model.layers.0.mlp.up_proj"); * crosses dots
  std::optional<formats::Scheme> scheme;  ///< nothing: keep 16 bit
};

struct Recipe {
  std::vector<RecipeRule> rules;

  /// The first rule that matches `module`, or null.
  const RecipeRule* find(std::string_view module) const;
};

/// fnmatch-style: *, ?, [a-z]; the whole name must match.
bool glob_match(std::string_view glob, std::string_view name);

}  // namespace w4q::quantize
