#include "quantize/recipe.h"

#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace w4q::quantize {
namespace {

constexpr std::string_view arrow = " → ";
constexpr std::string_view rotate_name = "rotate";

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// The names between the separators; "+" joins steps that alternate.
std::vector<std::string_view> names_of(std::string_view text) {
  std::vector<std::string_view> names;
  while (true) {
    size_t end = text.size(), length = 0;
    for (const std::string_view separator : {"→", "->", ",", "+"}) {
      const size_t found = text.find(separator);
      if (found >= end) continue;
      end = found;
      length = separator.size();
    }
    names.push_back(trimmed(text.substr(0, end)));
    if (length == 0) return names;
    text.remove_prefix(end + length);
  }
}

[[noreturn]] void refuse(std::string_view name, std::string_view why) {
  throw Error(ErrorCode::bad_argument, concat("step \"", printable(name), "\": ", why))
      .hint(
          "steps are, in this order: fold → awq → rotate128 → lloyd+search → feedback; clip → feedback for integers; "
          "search → "
          "feedback → norms "
          "for the rotated family");
}

/// Takes one step; returns its place in the order.
int take(std::string_view name, Steps& steps) {
  if (name == "fold") return steps.fold = true, 0;
  if (name == "awq") return steps.awq = true, 1;
  if (name == "lloyd") return steps.learn = true, 3;
  if (name == "search") return steps.search = true, 4;
  if (name == "clip") return steps.clip = true, 5;
  if (name == "feedback") return steps.feedback = true, 6;
  if (name == "norms") return steps.norms = true, 7;
  if (!name.starts_with(rotate_name)) refuse(name, "no such step");
  const std::string_view width = name.substr(rotate_name.size());
  const auto [end, error] = std::from_chars(width.data(), width.data() + width.size(), steps.rotate);
  const bool fits = error == std::errc{} && end == width.data() + width.size() &&
                    std::ranges::count(rotation_widths, steps.rotate) > 0;
  if (!fits) refuse(name, "rotations have blocks of 32, 64, 128 or 256");
  return 2;
}

}  // namespace

std::string to_string(const Steps& steps) {
  std::vector<std::string> names;
  if (steps.fold) names.emplace_back("fold");
  if (steps.awq) names.emplace_back("awq");
  if (steps.rotate > 0) names.push_back(concat(rotate_name, steps.rotate));
  if (steps.learn && steps.search) {
    names.emplace_back("lloyd+search");
  } else if (steps.learn || steps.search) {
    names.emplace_back(steps.learn ? "lloyd" : "search");
  }
  if (steps.clip) names.emplace_back("clip");
  if (steps.feedback) names.emplace_back("feedback");
  if (steps.norms) names.emplace_back("norms");
  return names.empty() ? "none" : join(names, arrow);
}

Steps parse_steps(std::string_view text) {
  Steps steps;
  if (trimmed(text) == "none") return steps;
  int last = -1;
  for (const auto name : names_of(text)) {
    const int place = take(name, steps);
    if (place == last) refuse(name, "is given twice");
    if (place < last) refuse(name, "comes too late");
    last = place;
  }
  return steps;
}

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
