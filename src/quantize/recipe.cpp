#include "quantize/recipe.h"

#include <fnmatch.h>

namespace w4q::quantize {

const RecipeRule* Recipe::find(std::string_view module) const {
  for (const RecipeRule& rule : rules) {
    if (glob_match(rule.glob, module)) return &rule;
  }
  return nullptr;
}

bool glob_match(std::string_view glob, std::string_view name) {
  // A NUL inside a name from a file would cut it short and match by accident.
  if (glob.find('\0') != std::string_view::npos || name.find('\0') != std::string_view::npos) return glob == name;
  return ::fnmatch(std::string(glob).c_str(), std::string(name).c_str(), 0) == 0;
}

}  // namespace w4q::quantize
