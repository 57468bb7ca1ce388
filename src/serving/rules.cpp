#include "serving/rules.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace w4q::serving {

std::string_view to_string(Severity severity) noexcept {
  constexpr std::array names{"note", "wrong", "refused"};
  return names[static_cast<size_t>(severity)];
}

void Findings::add(Severity severity, std::string tensor, std::string place, std::string expected, std::string got,
                   std::string remedy) {
  const auto same = std::ranges::find_if(list_, [&](const Finding& finding) {
    return finding.rule == rule_ && finding.severity == severity && finding.place == place &&
           finding.expected == expected && finding.got == got && !finding.tensors.empty() && !tensor.empty();
  });
  if (same != list_.end()) {
    if (std::ranges::find(same->tensors, tensor) == same->tensors.end()) same->tensors.push_back(std::move(tensor));
    return;
  }
  Finding finding{rule_, severity, {}, std::move(place), std::move(expected), std::move(got), std::move(remedy)};
  if (!tensor.empty()) finding.tensors.push_back(std::move(tensor));
  list_.push_back(std::move(finding));
}

std::vector<Rule> rules() {
  std::vector<Rule> all;
  for (const auto rows :
       {format_rules, config_rules, kernel_rules, layer_rules, file_rules, parallel_rules, value_rules, gguf_rules}) {
    std::ranges::move(rows(), std::back_inserter(all));
  }
  return all;
}

}  // namespace w4q::serving
