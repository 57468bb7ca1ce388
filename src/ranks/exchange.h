// What several ranks have measured, put together.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "ranks/ranks.h"

namespace w4q::ranks {

/// Makes value i what the rank owner(i) has there, at all ranks, which are of one kind. Throws Stopped, Interrupted.
template <class Owner>
void exchange(Ranks& ranks, std::span<double> values, const Owner& owner) {
  if (ranks.size() == 1) return;
  std::string own;
  for (size_t i = 0; i < values.size(); ++i) {
    if (owner(i) == ranks.rank()) own.append(reinterpret_cast<const char*>(&values[i]), sizeof(double));
  }
  const auto all = ranks.gather_everywhere(std::move(own));
  std::vector<std::string_view> rest(all.begin(), all.end());
  for (size_t i = 0; i < values.size(); ++i) {
    std::string_view& bytes = rest[static_cast<size_t>(owner(i))];
    ensure(bytes.size() >= sizeof(double), "the ranks differ in who has measured what");
    std::memcpy(&values[i], bytes.data(), sizeof(double));
    bytes.remove_prefix(sizeof(double));
  }
}

}  // namespace w4q::ranks
