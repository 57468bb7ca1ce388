#include "model/kinds.h"

#include <cctype>
#include <sstream>

#include "core/text.h"
#include "model/parameters.h"

namespace w4q::model {
namespace {

bool is_number(const std::string& part) {
  return !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

std::string kind_of(std::string_view name) {
  std::istringstream path{std::string(module_path(name))};
  std::string part, last, before;
  while (std::getline(path, part, '.')) {
    if (is_number(part)) continue;
    before = std::exchange(last, part);
  }
  return before.find("expert") == std::string::npos ? last : before + "." + last;
}

std::string words_text(const std::set<std::string>& words) {
  constexpr size_t shown = 2;
  if (words.size() <= shown + 1) return join({words.begin(), words.end()});
  return concat(join({words.begin(), std::next(words.begin(), shown)}), ", … ", words.size(), " in all");
}

void KindError::add(const WeightError& error) {
  total_.add(error);
  worst_sqnr_ = std::min(worst_sqnr_, error.sqnr());
  worst_relative_ = std::max(worst_relative_, error.relative());
}

std::vector<std::string> KindError::head() { return {"SQNR dB", "worst", "relative error", "worst", "max error"}; }

std::vector<std::string> KindError::cells() const {
  return {fixed(total_.sqnr(), 2), fixed(worst_sqnr_, 2), fixed(total_.relative(), 5), fixed(worst_relative_, 5),
          fixed(total_.max_error, 6)};
}

}  // namespace w4q::model
