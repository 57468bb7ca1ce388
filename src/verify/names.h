// What names of tensors and modules say.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace w4q::verify {

/// Whether one of `parts` stands anywhere in a name.
inline bool has_part(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

}  // namespace w4q::verify
