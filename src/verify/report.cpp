#include "verify/report.h"

#include <algorithm>

#include "core/text.h"

namespace w4q::verify {
namespace {

/// Faults printed in full; the rest is counted. The JSON holds all of them.
constexpr size_t faults_shown = 20;

}  // namespace

void Report::add_threshold(std::string name, double value, double limit, bool at_least) {
  const Verdict verdict{name, value, limit, at_least};
  const bool passed = verdict.passed();
  const std::string found = concat(value, passed ? " is" : " is not", at_least ? " at least " : " at most ", limit);
  add({std::move(name), passed, found, {}, {verdict}});
}

bool Report::passed() const noexcept {
  return std::all_of(checks_.begin(), checks_.end(), [](const Check& check) { return check.passed; });
}

std::string Report::text() const {
  std::string text;
  for (const auto& check : checks_) {
    text += concat(check.passed ? "pass  " : "FAIL  ", check.name, ": ", check.detail, "\n");
    for (size_t i = 0; i < std::min(check.faults.size(), faults_shown); ++i)
      text += "        " + check.faults[i] + "\n";
    if (check.faults.size() > faults_shown) {
      text += concat("        … and ", check.faults.size() - faults_shown, " more (--json lists all)\n");
    }
  }
  return text;
}

io::Json Report::json() const {
  io::Json checks = io::Json::array();
  for (const auto& check : checks_) {
    io::Json verdicts = io::Json::array();
    for (const Verdict& verdict : check.verdicts) {
      verdicts.push_back({{"of", verdict.of},
                          {"value", verdict.value},
                          {"limit", verdict.limit},
                          {"at_least", verdict.at_least},
                          {"margin", verdict.margin()},
                          {"passed", verdict.passed()}});
    }
    checks.push_back({{"name", check.name},
                      {"passed", check.passed},
                      {"detail", check.detail},
                      {"faults", check.faults},
                      {"verdicts", std::move(verdicts)}});
  }
  return {{"passed", passed()}, {"checks", std::move(checks)}};
}

}  // namespace w4q::verify
