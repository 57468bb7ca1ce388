// Which tensor gets which scheme: ordered glob → scheme rules, the first match wins, no match keeps 16 bit; and which
// steps are taken beyond rounding each weight by itself.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "quantize/steps.h"

namespace w4q::quantize {

struct RecipeRule {
  std::string glob;                       ///< against the module path ("model.layers.0.mlp.up_proj"); * crosses dots
  std::optional<formats::Scheme> scheme;  ///< nothing: keep 16 bit
  std::vector<formats::Scheme> residual = {};  ///< further passes, each of what those before it left over
};

struct Recipe {
  std::vector<RecipeRule> rules;
  std::optional<Steps> steps = {};  ///< nothing: whoever uses it says

  /// The first rule that matches `module`, or null.
  const RecipeRule* find(std::string_view module) const;
};

/// fnmatch-style: *, ?, [a-z]; the whole name must match.
bool glob_match(std::string_view glob, std::string_view name);

}  // namespace w4q::quantize
