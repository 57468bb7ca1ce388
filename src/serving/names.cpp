#include "serving/names.h"

#include <algorithm>

#include "core/text.h"
#include "text/work_budget.h"

namespace w4q::serving {
namespace {

constexpr std::string_view pattern_mark = "re:";

/// A glob with * alone, as an expression.
std::string expression_of(std::string_view glob) {
  std::string text;
  for (const char c : glob) {
    if (c == '*') {
      text += ".*";
    } else {
      if (std::string_view(".^$+?()[]{}|\\").find(c) != std::string_view::npos) text += '\\';
      text += c;
    }
  }
  return text + "\\z";
}

}  // namespace

Pattern::Pattern(std::string_view expression, std::string_view place)
    : regex_(concat("\\A(?:", expression, ")"), place) {}

bool Pattern::matches(std::string_view name) const {
  text::WorkBudget budget(name.size() + 64);
  return regex_.search(name, 0, budget).has_value();
}

NameList::NameList(const std::vector<std::string>& entries, std::string_view place) {
  for (const auto& entry : entries) {
    if (entry.starts_with(pattern_mark)) {
      patterns_.emplace_back(entry, Pattern(std::string_view(entry).substr(pattern_mark.size()), place));
    } else if (entry.find('*') != std::string::npos) {
      globs_.emplace_back(entry, Pattern(expression_of(entry), place));
    } else if (!entry.empty()) {
      names_.insert(entry);
    }
  }
}

std::string NameList::exact(std::string_view name) const {
  if (const auto found = names_.find(name); found != names_.end()) return *found;
  const auto found = std::ranges::find_if(patterns_, [&](const auto& entry) { return entry.second.matches(name); });
  return found == patterns_.end() ? std::string() : found->first;
}

std::string NameList::suffix(std::string_view name) const {
  if (std::string entry = exact(name); !entry.empty()) return entry;
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
    if (const auto found = names_.find(name.substr(dot + 1)); found != names_.end()) return *found;
  }
  return {};
}

std::string NameList::substring(std::string_view name) const {
  if (const auto found = names_.find(name); found != names_.end()) return *found;
  const auto found =
      std::ranges::find_if(names_, [&](const auto& entry) { return name.find(entry) != std::string_view::npos; });
  return found == names_.end() ? std::string() : *found;
}

std::string NameList::path_or_glob(std::string_view name) const {
  if (std::string entry = suffix(name); !entry.empty()) return entry;
  for (size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0; dot = name.rfind('.', dot - 1)) {
    if (const auto found = names_.find(name.substr(0, dot)); found != names_.end()) return *found;
  }
  const auto found = std::ranges::find_if(globs_, [&](const auto& entry) { return entry.second.matches(name); });
  return found == globs_.end() ? std::string() : found->first;
}

std::string NameList::held_by(std::string_view name) const {
  const auto found =
      std::ranges::find_if(names_, [&](const auto& entry) { return entry.find(name) != std::string::npos; });
  return found == names_.end() ? std::string() : *found;
}

std::string with_part(std::string_view name, std::string_view fused, std::string_view part) {
  std::string text(name);
  for (size_t at = text.find(fused); at != std::string::npos; at = text.find(fused, at + part.size())) {
    text.replace(at, fused.size(), part);
  }
  return text;
}

}  // namespace w4q::serving
