#include "verify/statistics/repeated_parts.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "model/parameters.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {

std::string part_in_layer(const std::string& name) {
  const std::string role = role_of(name);
  const size_t layers = role.find("layers.");
  const std::string rest = layers == std::string::npos ? role : role.substr(layers + 7);
  return rest.substr(0, rest.find('.'));
}

std::string lone_part(std::span<const Repeated> repeated, const std::vector<std::string>& matrices) {
  std::set<std::pair<int64_t, int64_t>> pairs;
  std::set<std::string> parts, copied;
  for (const auto& [name, of] : repeated) {
    const auto first = model::layer_numbers(of), second = model::layer_numbers(name);
    if (second.expert >= 0 || first.layer < 0) return {};
    pairs.emplace(first.layer, second.layer), parts.insert(part_in_layer(name)), copied.insert(name);
  }
  if (pairs.size() != 1 || parts.size() != 1) return {};
  const bool others = std::ranges::any_of(matrices, [&](const std::string& name) {
    return model::layer_numbers(name).layer == pairs.begin()->second && !copied.contains(name) &&
           part_in_layer(name) != *parts.begin();
  });
  return others ? *parts.begin() : std::string();
}

}  // namespace w4q::verify
