// The verdict: a list of checks, each with what it found. One check that failed fails the whole.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::verify {

/// A number that was held against a limit, whether it holds or not.
struct Verdict {
  std::string of;  ///< what, and of which tensor: "KL", "sigmas of model.layers.0.mlp.up_proj rows"
  double value = 0;
  double limit = 0;
  bool at_least = false;  ///< otherwise at most

  bool passed() const noexcept { return at_least ? value >= limit : value <= limit; }
  /// How far it is from failing; negative: by how much it fails.
  double margin() const noexcept { return at_least ? value - limit : limit - value; }
};

struct Check {
  std::string name;  ///< "structure", "codes", "perplexity ratio" …
  bool passed = true;
  std::string detail;               ///< what was found, one line
  std::vector<std::string> faults;  ///< one line each; empty when passed
  std::vector<Verdict> verdicts = {};
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
