// Lists of module names as programs match them.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/regex.h"

namespace w4q::serving {

/// An expression that is matched from the start of a name, as Python's re.match does.
class Pattern {
 public:
  /// Throws unsupported, beginning with `place`, for what is no expression.
  Pattern(std::string_view expression, std::string_view place);
  bool matches(std::string_view name) const;

 private:
  text::Regex regex_;
};

/// Paths, and patterns behind "re:" or with *.
class NameList {
 public:
  NameList() = default;
  NameList(const std::vector<std::string>& entries, std::string_view place);

  bool empty() const noexcept { return names_.empty() && patterns_.empty() && globs_.empty(); }
  /// The entry that is the name itself, or whose pattern behind "re:" matches it; empty: none.
  std::string exact(std::string_view name) const;
  /// … or that the name ends with, behind a dot.
  std::string suffix(std::string_view name) const;
  /// … or that stands anywhere in the name.
  std::string substring(std::string_view name) const;
  /// … or that is the name up to a dot, or a glob that matches it.
  std::string path_or_glob(std::string_view name) const;
  /// The entry that holds the name.
  std::string held_by(std::string_view name) const;

 private:
  std::set<std::string, std::less<>> names_;
  std::vector<std::pair<std::string, Pattern>> patterns_, globs_;
};

/// "model.layers.0.self_attn.qkv_proj" with "q_proj" in the place of "qkv_proj", wherever that stands.
std::string with_part(std::string_view name, std::string_view fused, std::string_view part);

}  // namespace w4q::serving
