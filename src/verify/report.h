// The verdict: a list of checks, each with what it found. One check that failed fails the whole.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::verify {

struct Check {
  std::string name;  ///< "structure", "codes", "perplexity ratio" …
  bool passed = true;
  std::string detail;               ///< what was found, one line
  std::vector<std::string> faults;  ///< one line each; empty when passed
};

class Report {
 public:
  void add(Check check) { checks_.push_back(std::move(check)); }
  /// Adds "value ≤ limit" (or ≥ when `at_least`); a NaN fails.
  void add_threshold(std::string name, double value, double limit, bool at_least = false);

  bool passed() const noexcept;
  const std::vector<Check>& checks() const noexcept { return checks_; }
  std::string text() const;
  io::Json json() const;

 private:
  std::vector<Check> checks_;
};

}  // namespace w4q::verify
